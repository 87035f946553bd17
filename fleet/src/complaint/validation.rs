//! The schema errors of FastAPI and pydantic: a list of flaws, each with its place, its message and the input at fault.
//!
//! SGLang writes the list as Python would print it, so the little of Python's syntax that can stand there is read: strings,
//! brackets, and everything else up to the next comma. The input is never looked into, as it may be the whole request.

use serde::Deserialize;

/// Flaws told; the others are counted.
const MAX_FLAWS: usize = 4;

/// How deep the brackets of an input may nest. Deeper ones are not read, so nothing is told.
const MAX_DEPTH: usize = 128;

/// The message for the client, and the field.
type Told = (String, Option<String>);

#[derive(Default)]
struct Flaw {
    place: Vec<String>,
    message: String,
}

/// Reads the text of such a list: `2 validation errors:` and a flaw a line.
pub(super) fn from_text(text: &str) -> Option<Told> {
    let (first, rest) = text.split_once('\n')?;
    let count: usize = first.split_once(' ')?.0.parse().ok()?;
    if !first.contains(" validation error") {
        return None;
    }
    let mut python = Python { text: rest, depth: 0 };
    let mut flaws = Vec::new();
    while flaws.len() < count.min(MAX_FLAWS) {
        match python.flaw() {
            Some(flaw) => flaws.push(flaw),
            None => break,
        }
    }
    // A list that cannot be read is one whose words are not for clients either.
    Some(tell(&flaws, count).unwrap_or_else(|| ("the request does not fit the worker's schema".to_owned(), None)))
}

/// Reads FastAPI's own form of the list, which is JSON.
pub(super) fn from_json(detail: &str) -> Option<Told> {
    #[derive(Deserialize)]
    struct Item {
        #[serde(default)]
        loc: Vec<serde_json::Value>,
        msg: String,
    }
    let items: Vec<Item> = serde_json::from_str(detail).ok()?;
    let place = |part: serde_json::Value| match part {
        serde_json::Value::String(text) => text,
        other => other.to_string(),
    };
    let count = items.len();
    let flaw = |item: Item| Flaw { place: item.loc.into_iter().map(place).collect(), message: item.msg };
    let flaws: Vec<Flaw> = items.into_iter().take(MAX_FLAWS).map(flaw).collect();
    tell(&flaws, count)
}

fn tell(flaws: &[Flaw], count: usize) -> Option<Told> {
    let mut told: Vec<String> = flaws.iter().map(Flaw::tell).collect();
    told.dedup();
    let mut message = told.join("; ");
    if message.is_empty() {
        return None;
    }
    if count > flaws.len() {
        message.push_str(&format!("; and {} more", count - flaws.len()));
    }
    // The offset of a syntax error is no field.
    Some((message, flaws.first().and_then(Flaw::field).filter(|field| !is_offset(field))))
}

fn is_offset(field: &str) -> bool {
    field.bytes().all(|b| b.is_ascii_digit())
}

// === impl Flaw ===

impl Flaw {
    /// The place within the body, as clients write it: `messages.0.content`.
    fn field(&self) -> Option<String> {
        let place = match self.place.split_first() {
            Some((first, rest)) if first == "body" => rest,
            _ => &self.place,
        };
        (!place.is_empty()).then(|| place.join("."))
    }

    fn tell(&self) -> String {
        match self.field() {
            Some(field) if is_offset(&field) => format!("{} at {field}", self.message),
            Some(field) => format!("{field}: {}", self.message),
            None => self.message.clone(),
        }
    }
}

/// What is left to read of Python's text.
struct Python<'a> {
    text: &'a str,
    depth: usize,
}

impl Python<'_> {
    /// The next dictionary with a `msg`.
    fn flaw(&mut self) -> Option<Flaw> {
        self.skip_space();
        self.take('{')?;
        let mut flaw = Flaw::default();
        loop {
            self.skip_space();
            if self.take('}').is_some() {
                break;
            }
            let key = self.string()?;
            self.skip_space();
            self.take(':')?;
            self.skip_space();
            match key.as_str() {
                "loc" => flaw.place = self.list()?,
                "msg" => flaw.message = self.string()?,
                _ => self.skip_value()?,
            }
            self.skip_space();
            // Left out behind the last one.
            let _ = self.take(',');
        }
        (!flaw.message.is_empty()).then_some(flaw)
    }

    /// A tuple or list of strings and numbers.
    fn list(&mut self) -> Option<Vec<String>> {
        let close = if self.take('(').is_some() {
            ')'
        } else {
            self.take('[')?;
            ']'
        };
        let mut items = Vec::new();
        loop {
            self.skip_space();
            if self.take(close).is_some() {
                return Some(items);
            }
            if self.text.starts_with(['\'', '"']) {
                items.push(self.string()?);
            } else {
                let end = self.text.find([',', close])?;
                let (item, rest) = self.text.split_at_checked(end)?;
                items.push(item.trim().to_owned());
                self.text = rest;
            }
            self.skip_space();
            let _ = self.take(',');
        }
    }

    /// A string, its escapes resolved where that matters to a reader.
    fn string(&mut self) -> Option<String> {
        let quote = self.text.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
        let mut value = String::new();
        let mut chars = self.text.char_indices().skip(1);
        while let Some((at, c)) = chars.next() {
            if c == quote {
                self.text = self.text.get(at + 1..)?;
                return Some(value);
            }
            match c {
                '\\' => match chars.next()?.1 {
                    'n' | 'r' | 't' => value.push(' '),
                    other => value.push(other),
                },
                c => value.push(c),
            }
        }
        None
    }

    /// Anything up to the comma or bracket behind it.
    fn skip_value(&mut self) -> Option<()> {
        loop {
            let next = self.text.chars().next()?;
            match next {
                '\'' | '"' => {
                    self.string()?;
                }
                '{' | '[' | '(' => {
                    self.depth += 1;
                    if self.depth > MAX_DEPTH {
                        return None;
                    }
                    self.text = self.text.get(1..)?;
                }
                '}' | ']' | ')' if self.depth > 0 => {
                    self.depth -= 1;
                    self.text = self.text.get(1..)?;
                }
                '}' | ']' | ')' | ',' if self.depth == 0 => return Some(()),
                other => self.text = self.text.get(other.len_utf8()..)?,
            }
        }
    }

    fn skip_space(&mut self) {
        self.text = self.text.trim_start();
    }

    fn take(&mut self, c: char) -> Option<()> {
        self.text = self.text.strip_prefix(c)?;
        Some(())
    }
}
