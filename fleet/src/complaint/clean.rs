//! Takes out of a message what is none of the client's business: files, addresses, ids, stack traces, and whatever makes it
//! longer than a sentence needs to be.

/// Longest message, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 512;

/// What stands for something taken out.
const GONE: &str = "[…]";

/// Where the words for people end.
const TRACES: [&str; 4] = ["\n\n  File \"", "Traceback (most recent call last)", "\n  File \"", "\n    at "];

/// The message without files, network addresses, long ids, stack traces and `secrets`, on one line and of bounded length.
pub fn clean(message: &str, secrets: &[&str]) -> String {
    let end = TRACES.iter().filter_map(|mark| message.find(mark)).min().unwrap_or(message.len());
    let mut end = end.min(16 * MAX_MESSAGE_BYTES);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    let mut text = message.get(..end).unwrap_or_default().to_owned();
    for secret in secrets.iter().filter(|secret| !secret.is_empty()) {
        text = text.replace(secret, GONE);
    }
    let mut out = String::with_capacity(text.len());
    for word in text.split(|c: char| c.is_whitespace() || c.is_control()).filter(|word| !word.is_empty()) {
        if !out.is_empty() {
            out.push(' ');
        }
        put(&mut out, word);
        if out.len() > MAX_MESSAGE_BYTES {
            break;
        }
    }
    cut(out)
}

fn cut(mut text: String) -> String {
    if text.len() <= MAX_MESSAGE_BYTES {
        return text;
    }
    let mut end = MAX_MESSAGE_BYTES - '…'.len_utf8();
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    text.push('…');
    text
}

/// Appends a word, with quotes and punctuation around it kept.
fn put(out: &mut String, word: &str) {
    let quote =
        |c: char| matches!(c, '"' | '\'' | '`' | '(' | ')' | '{' | '}' | '<' | '>' | ',' | ';' | '.' | '!' | '?');
    let mark = |c: char| quote(c) || matches!(c, '[' | ']' | ':' | '=');
    // Brackets and colons may belong to an address.
    let private = |text: &str| {
        [text.trim_matches(quote), text.trim_matches(mark)]
            .into_iter()
            .find(|inner| is_private(inner))
            .map(str::to_owned)
    };
    if let Some(inner) = private(word) {
        return out.push_str(&word.replacen(&inner, GONE, 1));
    }
    // A private part may hide behind an equals sign or in a list without spaces.
    for part in word.split_inclusive(['=', ',', '"', '\'', '(', '<']) {
        match private(part) {
            Some(inner) => out.push_str(&part.replacen(&inner, GONE, 1)),
            None => out.push_str(part),
        }
    }
}

fn is_private(word: &str) -> bool {
    is_file(word) || is_address(word) || is_id(word)
}

/// An absolute path of two steps or more, a path in a home, a Windows path, or a Python file. The API's own paths are not.
fn is_file(word: &str) -> bool {
    let api = ["/v1/", "/generate", "/tokenize", "/detokenize"];
    if api.iter().any(|path| word.starts_with(path)) {
        return false;
    }
    let steps = |rest: &str| rest.split('/').filter(|step| !step.is_empty()).count();
    (word.starts_with('/') && steps(word) >= 2)
        || word.starts_with("~/")
        || word.starts_with("file:")
        || word.get(1..3) == Some(":\\")
        || word.split(':').next().is_some_and(|file| file.ends_with(".py") || file.ends_with(".so"))
}

/// A URL, an IP address, or a host with a port.
fn is_address(word: &str) -> bool {
    if word.contains("://") {
        return true;
    }
    let (host, port) = match word.rsplit_once(':') {
        Some((host, port)) if !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit()) => (host, true),
        _ => (word, false),
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let ip = host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_ipv4() || port || host.len() > 4);
    let name = |part: &str| {
        !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
    };
    ip || (port && (host == "localhost" || (host.contains(['.', '-']) && name(host))))
}

/// 32 hexadecimal digits or more, dashes of a UUID included, perhaps behind a prefix such as `resp_`.
fn is_id(word: &str) -> bool {
    let digits = word.rsplit('_').next().unwrap_or(word);
    digits.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-')
        && digits.bytes().filter(u8::is_ascii_hexdigit).count() >= 32
}
