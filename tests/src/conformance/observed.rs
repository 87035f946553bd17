//! What came of a request, and whether it is what a test expects.

use super::case::{Expect, Got, GotRequest, OneOrMore, value_bytes};
use super::pattern::matches;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Headers or trailers, in order, names in lower case.
pub type Fields = Vec<(String, Vec<u8>)>;

/// A request that a server got.
#[derive(Clone, Debug, Default)]
pub struct Recorded {
    /// `:method`.
    pub method: String,
    /// `:path`.
    pub path: String,
    /// Headers.
    pub headers: Fields,
    /// The body.
    pub body: Vec<u8>,
    /// Trailers.
    pub trailers: Fields,
}

/// What a client got.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    /// `:status`.
    pub status: u16,
    /// Headers.
    pub headers: Fields,
    /// The body.
    pub body: Vec<u8>,
    /// Trailers.
    pub trailers: Fields,
    /// It came to its proper end.
    pub complete: bool,
}

/// What came of a request.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// What the clients got; nothing for one that left or got none.
    pub replies: Vec<Option<Reply>>,
    /// What the upstream got.
    pub upstream: Vec<Recorded>,
    /// What callees got.
    pub callees: BTreeMap<String, Vec<Recorded>>,
    /// What the guests logged.
    pub log: Vec<String>,
}

/// Bytes as a test writes them.
pub fn shown(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in bytes {
        match byte {
            b'\n' | b'\r' | b'\t' | 0x20..=0x7e => text.push(char::from(*byte)),
            _ => {
                // Writing to a string cannot fail.
                let _ = write!(text, "\\x{byte:02x}");
            }
        }
    }
    text
}

fn cut(text: &str) -> String {
    if text.len() <= 400 {
        text.to_owned()
    } else {
        format!("{}… ({} bytes)", &text[..text.floor_char_boundary(400)], text.len())
    }
}

/// Whether a text is what is expected. A pattern without special characters may hold `\xNN`.
fn like(pattern: &str, bytes: &[u8]) -> bool {
    value_bytes(pattern) == bytes || matches(pattern, &shown(bytes))
}

fn values(fields: &Fields, name: &str) -> Vec<Vec<u8>> {
    fields.iter().filter(|(known, _)| known == name).map(|(_, value)| value.clone()).collect()
}

fn check_fields(
    what: &str,
    fields: &Fields,
    expected: &BTreeMap<String, OneOrMore<String>>,
    absent: &[String],
    problems: &mut Vec<String>,
) {
    for (name, patterns) in expected {
        let got = values(fields, name);
        let patterns = patterns.all();
        if got.len() != patterns.len() || !got.iter().zip(patterns).all(|(value, pattern)| like(pattern, value)) {
            let got: Vec<String> = got.iter().map(|value| shown(value)).collect();
            problems.push(format!("{what} {name}: expected {patterns:?}, got {got:?}"));
        }
    }
    for name in absent {
        let got = values(fields, name);
        if !got.is_empty() {
            problems.push(format!("{what} {name}: expected none, got {:?}", shown(&got.concat())));
        }
    }
}

fn check_body(what: &str, bytes: &[u8], pattern: Option<&String>, size: Option<usize>, problems: &mut Vec<String>) {
    if let Some(pattern) = pattern
        && !like(pattern, bytes)
    {
        problems.push(format!("{what} body: expected {pattern:?}, got {:?}", cut(&shown(bytes))));
    }
    if let Some(size) = size
        && size != bytes.len()
    {
        problems.push(format!("{what} body: expected {size} bytes, got {}", bytes.len()));
    }
}

impl GotRequest {
    fn check(&self, what: &str, got: &Recorded, problems: &mut Vec<String>) {
        for (part, pattern, value) in [("method", &self.method, &got.method), ("path", &self.path, &got.path)] {
            if let Some(pattern) = pattern
                && !matches(pattern, value)
            {
                problems.push(format!("{what} {part}: expected {pattern:?}, got {value:?}"));
            }
        }
        check_fields(&format!("{what} header"), &got.headers, &self.headers, &self.no_headers, problems);
        check_fields(&format!("{what} trailer"), &got.trailers, &self.trailers, &[], problems);
        check_body(what, &got.body, self.body.as_ref(), self.body_size, problems);
    }
}

fn check_got(what: &str, expected: &Got, got: &[Recorded], requests: usize, problems: &mut Vec<String>) {
    match (expected, got) {
        (Got::Any(false), []) => {}
        (Got::Any(true), _) if got.len() == requests => {}
        (Got::Like(like), [_, ..]) if got.len() == requests => {
            got.iter().for_each(|got| like.check(what, got, problems));
        }
        _ => {
            let expected = if matches!(expected, Got::Any(false)) { 0 } else { requests };
            problems.push(format!("{what}: expected {expected} request(s), got {}", got.len()));
        }
    }
}

/// Whether the lines are those expected, in this order; else what differs.
pub fn same_lines(expected: &[String], got: &[String]) -> Result<(), String> {
    let same = expected.len() == got.len() && expected.iter().zip(got).all(|(pattern, line)| matches(pattern, line));
    if same {
        return Ok(());
    }
    let at = expected.iter().zip(got).position(|(pattern, line)| !matches(pattern, line));
    let at = at.unwrap_or_else(|| expected.len().min(got.len()));
    let show = |lines: &[String]| lines.iter().map(|line| format!("\n    {}", cut(line))).collect::<String>();
    Err(format!("log: differs from line {} on; expected{}\n  got{}", at + 1, show(expected), show(got)))
}

/// Whether the lines are those expected, in any order; else what differs.
pub fn lines_in_any_order(expected: &[String], got: &[String]) -> Result<(), String> {
    let mut left: Vec<&String> = got.iter().collect();
    let mut missing = Vec::new();
    for pattern in expected {
        match left.iter().position(|line| matches(pattern, line)) {
            Some(at) => drop(left.remove(at)),
            None => missing.push(pattern),
        }
    }
    if missing.is_empty() && left.is_empty() {
        return Ok(());
    }
    Err(format!("log: missing {missing:?}, unexpected {left:?}"))
}

/// Patterns that no line is like yet.
pub fn missing<'a>(expected: &'a [String], got: &[String]) -> Vec<&'a String> {
    let mut left: Vec<&String> = got.iter().collect();
    let found = |pattern: &String, left: &mut Vec<&String>| match left.iter().position(|line| matches(pattern, line)) {
        Some(at) => {
            left.remove(at);
            true
        }
        None => false,
    };
    expected.iter().filter(|pattern| !found(pattern, &mut left)).collect()
}

impl Expect {
    /// What differs from what is expected; nothing if all is well. Metrics are looked at elsewhere.
    pub fn problems(&self, observed: &Observed, clients: usize) -> Vec<String> {
        let mut problems = Vec::new();
        for reply in &observed.replies {
            self.check_reply(reply.as_ref(), &mut problems);
        }
        if let Some(expected) = &self.upstream {
            check_got("upstream", expected, &observed.upstream, clients, &mut problems);
        }
        for (name, expected) in &self.callees {
            let none = Vec::new();
            let got = observed.callees.get(name).unwrap_or(&none);
            if got.len() != expected.len() {
                problems.push(format!("callee {name}: expected {} request(s), got {}", expected.len(), got.len()));
            }
            for (expected, got) in expected.iter().zip(got) {
                check_got(&format!("callee {name}"), expected, std::slice::from_ref(got), 1, &mut problems);
            }
        }
        if let Some(expected) = &self.log
            && let Err(problem) = same_lines(expected, &observed.log)
        {
            problems.push(problem);
        }
        if let Some(expected) = &self.logs
            && let Err(problem) = lines_in_any_order(expected, &observed.log)
        {
            problems.push(problem);
        }
        let unwanted = |line: &&String| self.no_log.iter().any(|pattern| matches(pattern, line));
        problems.extend(observed.log.iter().filter(unwanted).map(|line| format!("log: unexpected {line:?}")));
        for line in observed.log.iter().filter(|line| line.contains("PROGRAM ERROR")) {
            problems.push(line.clone());
        }
        problems
    }

    fn check_reply(&self, reply: Option<&Reply>, problems: &mut Vec<String>) {
        let whole = reply.is_some_and(|reply| reply.complete);
        if self.broken == whole {
            let got = reply.map_or("none".to_owned(), |r| format!("{} {:?}", r.status, cut(&shown(&r.body))));
            let expected = if self.broken { "no whole answer" } else { "a whole answer" };
            problems.push(format!("reply: expected {expected}, got {got}"));
        }
        let Some(reply) = reply else { return };
        if let Some(expected) = &self.status
            && !expected.all().contains(&reply.status)
        {
            let body = cut(&shown(&reply.body));
            problems.push(format!("status: expected {:?}, got {} {body:?}", expected.all(), reply.status));
        }
        check_fields("header", &reply.headers, &self.headers, &self.no_headers, problems);
        check_fields("trailer", &reply.trailers, &self.trailers, &[], problems);
        check_body("reply", &reply.body, self.body.as_ref(), self.body_size, problems);
    }
}
