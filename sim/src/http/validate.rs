//! Request bodies and the schema errors, worded as the real server words them.

use super::reply::{self, Body};
use crate::pytext::{repr, repr_str};
use hyper::{HeaderMap, Response, header};
use serde_json::{Map, Value};
use std::fmt::Write as _;

/// An endpoint as it shows in schema errors.
#[derive(Clone, Copy)]
pub(super) struct Endpoint {
    pub path: &'static str,
    pub function: &'static str,
    pub line: u32,
}

/// One schema error.
#[derive(Clone)]
pub(super) struct Flaw {
    pub kind: &'static str,
    /// Where, each part as Python spells it.
    pub place: Vec<String>,
    pub message: String,
    /// The input as Python spells it.
    pub input: String,
    /// More, as Python spells it.
    pub context: Option<String>,
}

impl Flaw {
    pub(super) fn at(kind: &'static str, field: &str, message: &str, input: &Value) -> Self {
        Self {
            kind,
            place: vec![repr_str("body"), repr_str(field)],
            message: message.to_owned(),
            input: repr(input),
            context: None,
        }
    }

    pub(super) fn missing(field: &str, body: &Map<String, Value>) -> Self {
        Self::at("missing", field, "Field required", &Value::Object(body.clone()))
    }

    fn text(&self) -> String {
        let comma = if self.place.len() == 1 { "," } else { "" };
        let mut text = format!(
            "{{'type': '{}', 'loc': ({}{comma}), 'msg': {}, 'input': {}",
            self.kind,
            self.place.join(", "),
            repr_str(&self.message),
            self.input
        );
        if let Some(context) = &self.context {
            let _ = write!(text, ", 'ctx': {context}");
        }
        text.push('}');
        text
    }
}

/// The whole message: the flaws one a line, the place in the server's sources, the flaws again as a list.
pub(super) fn message(endpoint: Endpoint, flaws: &[Flaw]) -> String {
    let texts: Vec<String> = flaws.iter().map(Flaw::text).collect();
    let plural = if texts.len() == 1 { "" } else { "s" };
    format!(
        "{} validation error{plural}:\n  {}\n\n  File \"/site-packages/sglang/srt/entrypoints/http_server.py\", line {}, in \
         {}\n    POST {} [{}]",
        texts.len(),
        texts.join("\n  "),
        endpoint.line,
        endpoint.function,
        endpoint.path,
        texts.join(", ")
    )
}

/// What is wrong with a body.
pub(super) enum BodyError {
    /// Its schema; the message.
    Schema(String),
    /// It is JSON but no object: the handler breaks.
    Broken,
    /// The content type; the message.
    Type(String),
    /// It is no JSON; the place and the message.
    Syntax(usize, String),
}

impl BodyError {
    /// As the OpenAI and native endpoints answer it.
    pub(super) fn flat(&self) -> Response<Body> {
        match self {
            Self::Schema(message) | Self::Type(message) | Self::Syntax(_, message) => reply::invalid(message),
            Self::Broken => reply::internal(),
        }
    }
}

/// The body as an object.
pub(super) fn object(endpoint: Endpoint, body: &[u8]) -> Result<Map<String, Value>, BodyError> {
    if body.is_empty() {
        let flaw = Flaw {
            kind: "missing",
            place: vec![repr_str("body")],
            message: "Field required".to_owned(),
            input: "None".to_owned(),
            context: None,
        };
        return Err(BodyError::Schema(message(endpoint, &[flaw])));
    }
    let (place, what) = if std::str::from_utf8(body).is_err() {
        (0, "str is not valid UTF-8: surrogates not allowed")
    } else {
        match serde_json::from_slice::<Value>(body) {
            Ok(Value::Object(object)) => return Ok(object),
            Ok(_) => return Err(BodyError::Broken),
            Err(error) if error.is_eof() => (body.len(), "unexpected end of data"),
            Err(error) => {
                let line_start: usize =
                    body.split_inclusive(|byte| *byte == b'\n').take(error.line() - 1).map(<[u8]>::len).sum();
                let key = error.to_string().starts_with("key must be a string");
                let what = if key { "unexpected character, expected a string key" } else { "unexpected character" };
                (line_start + error.column().saturating_sub(1), what)
            }
        }
    };
    let flaw = Flaw {
        kind: "json_invalid",
        place: vec![repr_str("body"), place.to_string()],
        message: "JSON decode error".to_owned(),
        input: "{}".to_owned(),
        context: Some(format!("{{'error': {}}}", repr_str(what))),
    };
    Err(BodyError::Syntax(place, message(endpoint, &[flaw])))
}

/// The body as an object, of the right content type.
pub(super) fn typed_object(
    endpoint: Endpoint,
    headers: &HeaderMap,
    body: &[u8],
) -> Result<Map<String, Value>, BodyError> {
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = given.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if essence != "application/json" {
        let flaw = "{'loc': ['header', 'content-type'], 'msg': \"Unsupported Media Type: Only 'application/json' is allowed\", \
                    'type': 'value_error'}";
        return Err(BodyError::Type(format!("1 validation error:\n  {flaw} [{flaw}]")));
    }
    object(endpoint, body)
}

/// An integer as the schema takes it: a number without fraction, a truth value, or digits in a string.
/// Numbers beyond 64 bits come back as `None` in `Ok`, for the handler to refuse.
pub(super) fn integer(field: &str, value: &Value) -> Result<Option<i64>, Flaw> {
    const TOO_LONG: &str = "Unable to parse input string as an integer, exceeded maximum size";
    match value {
        Value::Bool(truth) => Ok(Some(i64::from(*truth))),
        Value::Number(number) => {
            if let Some(number) = number.as_i64() {
                return Ok(Some(number));
            }
            if number.is_u64() {
                return Ok(None);
            }
            let number = number.as_f64().unwrap_or(f64::NAN);
            if number.fract() != 0.0 {
                let text = "Input should be a valid integer, got a number with a fractional part";
                return Err(Flaw::at("int_from_float", field, text, value));
            }
            if number.abs() >= 9.2e18 {
                return Err(Flaw::at("int_parsing_size", field, TOO_LONG, value));
            }
            #[expect(clippy::cast_possible_truncation, reason = "checked just above")]
            Ok(Some(number as i64))
        }
        Value::String(text) => text.trim().parse().map(Some).map_err(|_| {
            let text = "Input should be a valid integer, unable to parse string as an integer";
            Flaw::at("int_parsing", field, text, value)
        }),
        _ => Err(Flaw::at("int_type", field, "Input should be a valid integer", value)),
    }
}
