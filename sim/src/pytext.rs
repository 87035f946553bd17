//! JSON and values spelled as Python spells them: SGLang's templates, tool arguments and error texts show both.

use serde_json::Value;
use std::fmt::Write as _;

/// `json.dumps(value, ensure_ascii=False)`: one space after `,` and `:`.
pub(crate) fn json(value: &Value) -> String {
    let mut out = String::new();
    write_json(value, &mut out);
    out
}

fn write_json(value: &Value, out: &mut String) {
    match value {
        Value::Array(items) => {
            out.push('[');
            for (place, item) in items.iter().enumerate() {
                if place > 0 {
                    out.push_str(", ");
                }
                write_json(item, out);
            }
            out.push(']');
        }
        Value::Object(entries) => {
            out.push('{');
            for (place, (key, item)) in entries.iter().enumerate() {
                if place > 0 {
                    out.push_str(", ");
                }
                let _ = write!(out, "{}: ", Value::from(key.as_str()));
                write_json(item, out);
            }
            out.push('}');
        }
        other => {
            let _ = write!(out, "{other}");
        }
    }
}

/// `repr(value)`.
pub(crate) fn repr(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Number(number) => {
            let text = number.to_string();
            // Python writes the sign of a positive exponent.
            if text.contains("e-") { text } else { text.replace('e', "e+").replace("e++", "e+") }
        }
        Value::String(text) => repr_str(text),
        Value::Array(items) => format!("[{}]", items.iter().map(repr).collect::<Vec<_>>().join(", ")),
        Value::Object(entries) => {
            let inner: Vec<String> =
                entries.iter().map(|(key, item)| format!("{}: {}", repr_str(key), repr(item))).collect();
            format!("{{{}}}", inner.join(", "))
        }
    }
}

/// `repr` of a string: single quotes unless the text has some and no double ones.
pub(crate) fn repr_str(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::with_capacity(text.len() + 2);
    out.push(quote);
    for character in text.chars() {
        match character {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            same if same == quote => {
                out.push('\\');
                out.push(same);
            }
            control if (control as u32) < 32 => {
                let _ = write!(out, "\\x{:02x}", control as u32);
            }
            other => out.push(other),
        }
    }
    out.push(quote);
    out
}
