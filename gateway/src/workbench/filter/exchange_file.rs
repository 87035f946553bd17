//! The exchange that a filter is tried on, described in a file: the request, the answer of the worker, the answers to the
//! filter's own calls.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use turnstile_plugins::HttpReply;

/// A request, and what comes back.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExchangeFile {
    /// The request's method.
    #[serde(default = "post")]
    method: String,
    /// Its path, with the query.
    #[serde(default = "chat")]
    path: String,
    /// Its headers; `host` is the authority.
    #[serde(default)]
    headers: Headers,
    /// Its body, a JSON value, byte for byte as it is written here; absent: none.
    #[serde(default)]
    #[schemars(with = "Option<serde_json::Value>")]
    body: Option<Box<RawValue>>,
    /// Its body instead, as texts that come one after the other.
    #[serde(default)]
    pieces: Option<Vec<String>>,
    /// Its trailers.
    #[serde(default)]
    trailers: Headers,
    /// The worker's answer; absent: only the request is tried.
    #[serde(default)]
    response: Option<ResponseEntry>,
    /// Answers to the filter's calls, by upstream: a list, of which each call takes the next. `null` is a call that fails, and
    /// so is one behind the last.
    #[serde(default)]
    calls: BTreeMap<String, Vec<Option<ResponseEntry>>>,
}

/// An answer.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ResponseEntry {
    /// Its status.
    #[serde(default = "ok")]
    status: u16,
    /// Its headers.
    #[serde(default)]
    headers: Headers,
    /// Its body, a JSON value, byte for byte as it is written here; absent: none.
    #[serde(default)]
    #[schemars(with = "Option<serde_json::Value>")]
    body: Option<Box<RawValue>>,
    /// Its body instead, as texts that come one after the other.
    #[serde(default)]
    pieces: Option<Vec<String>>,
    /// Its trailers.
    #[serde(default)]
    trailers: Headers,
}

type Headers = BTreeMap<String, OneOrMore>;

/// The values of a header.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
enum OneOrMore {
    One(String),
    More(Vec<String>),
}

fn post() -> String {
    "POST".to_owned()
}

fn chat() -> String {
    "/v1/chat/completions".to_owned()
}

fn ok() -> u16 {
    200
}

/// One side of an exchange.
#[derive(Debug, Clone, Default)]
pub struct Message {
    /// Headers.
    pub headers: HeaderMap,
    /// The body, in the pieces that it comes in.
    pub pieces: Vec<Bytes>,
    /// Trailers.
    pub trailers: HeaderMap,
}

/// What an [`ExchangeFile`] says.
#[derive(Debug, Clone)]
pub struct Exchange {
    /// The request's method.
    pub method: Method,
    /// Its path.
    pub path: String,
    /// The rest of it.
    pub request: Message,
    /// The worker's answer.
    pub response: Option<(StatusCode, Message)>,
    /// Answers to calls, by upstream.
    pub calls: BTreeMap<String, Vec<Option<HttpReply>>>,
}

impl Exchange {
    /// Reads a file's text.
    ///
    /// # Errors
    /// The member that is wrong, and why.
    pub fn parse(json: &[u8]) -> Result<Self, String> {
        // A list of members without their names would do otherwise.
        if !json.trim_ascii_start().starts_with(b"{") {
            return Err("expected a JSON object {method, path, headers, body, trailers, response, calls}".to_owned());
        }
        let file: ExchangeFile = serde_json::from_slice(json).map_err(|e| e.to_string())?;
        let method = Method::from_bytes(file.method.as_bytes()).map_err(|_| format!("method: {:?}", file.method))?;
        if !file.path.starts_with('/') || file.path.contains(|c: char| c.is_ascii_control() || c == ' ') {
            return Err(format!("path: expected one that begins with /, found {:?}", file.path));
        }
        let request = message("", file.headers, (file.body, file.pieces), file.trailers)?;
        let response = file.response.map(|entry| entry.read("response.")).transpose()?;
        let mut calls = BTreeMap::new();
        for (upstream, entries) in file.calls {
            let reply = |(at, entry): (usize, Option<ResponseEntry>)| {
                entry.map(|entry| entry.read(&format!("calls.{upstream}[{at}].")).map(reply)).transpose()
            };
            let replies = entries.into_iter().enumerate().map(reply).collect::<Result<_, String>>()?;
            calls.insert(upstream, replies);
        }
        Ok(Self { method, path: file.path, request, response, calls })
    }
}

impl ResponseEntry {
    fn read(self, at: &str) -> Result<(StatusCode, Message), String> {
        let wrong = || format!("{at}status: must be 200 to 599, found {}", self.status);
        let status = StatusCode::from_u16(self.status).ok().filter(|s| (200..600).contains(&s.as_u16()));
        let status = status.ok_or_else(wrong)?;
        Ok((status, message(at, self.headers, (self.body, self.pieces), self.trailers)?))
    }
}

fn reply((status, message): (StatusCode, Message)) -> HttpReply {
    let body = Bytes::from(message.pieces.concat());
    HttpReply { status, headers: message.headers, body, trailers: message.trailers }
}

fn message(
    at: &str,
    headers: Headers,
    body: (Option<Box<RawValue>>, Option<Vec<String>>),
    trailers: Headers,
) -> Result<Message, String> {
    let pieces = match body {
        (Some(_), Some(_)) => return Err(format!("{at}pieces: there is a body already")),
        (Some(body), None) => vec![Bytes::copy_from_slice(body.get().as_bytes())],
        // Nothing is no piece: it would be taken for the end.
        (None, pieces) => pieces.into_iter().flatten().filter(|piece| !piece.is_empty()).map(Bytes::from).collect(),
    };
    let fields = |name: &str, headers| fields(&format!("{at}{name}"), headers);
    Ok(Message { headers: fields("headers", headers)?, pieces, trailers: fields("trailers", trailers)? })
}

fn fields(at: &str, headers: Headers) -> Result<HeaderMap, String> {
    let mut map = HeaderMap::new();
    for (name, values) in headers {
        let key = HeaderName::try_from(name.as_str()).map_err(|_| format!("{at}: bad name {name:?}"))?;
        let values = match values {
            OneOrMore::One(value) => vec![value],
            OneOrMore::More(values) => values,
        };
        for value in values {
            let value = HeaderValue::try_from(value.as_str()).map_err(|_| format!("{at}.{name}: bad value"))?;
            map.try_append(key.clone(), value).map_err(|_| format!("{at}: there are too many"))?;
        }
    }
    Ok(map)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn errors_name_the_member() {
        for (json, said) in [
            ("[]", "expected a JSON object {method, path,"),
            (r#"{"reply": {}}"#, "unknown field `reply`"),
            (r#"{"method": "a b"}"#, r#"method: "a b""#),
            (r#"{"path": "x"}"#, r#"path: expected one that begins with /, found "x""#),
            (r#"{"headers": {"a b": "x"}}"#, r#"headers: bad name "a b""#),
            (r#"{"trailers": {"a": ["x", "\n"]}}"#, "trailers.a: bad value"),
            (r#"{"body": 1, "pieces": ["2"]}"#, "pieces: there is a body already"),
            (r#"{"response": {"status": 100}}"#, "response.status: must be 200 to 599, found 100"),
            (r#"{"response": {"headers": {"": "x"}}}"#, r#"response.headers: bad name """#),
            (
                r#"{"calls": {"auth": [null, {"body": 1, "pieces": []}]}}"#,
                "calls.auth[1].pieces: there is a body already",
            ),
        ] {
            let error = Exchange::parse(json.as_bytes()).unwrap_err();
            assert!(error.contains(said), "{json}: {error}");
        }
    }

    #[test]
    fn a_body_is_what_was_written_and_pieces_are_texts() {
        let exchange = Exchange::parse(
            br#"{"headers": {"a": ["1", "2"]}, "body": {"n":  1.50}, "response": {"pieces": ["one", "", "two"]}}"#,
        )
        .unwrap();
        assert_eq!(exchange.request.pieces, [Bytes::from_static(br#"{"n":  1.50}"#)]);
        assert_eq!(exchange.request.headers.get_all("a").iter().count(), 2);
        assert_eq!(exchange.response.unwrap().1.pieces, ["one", "two"].map(Bytes::from));
    }
}
