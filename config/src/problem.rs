//! What is wrong with a configuration, and where.

use std::fmt;

use serde::Serialize;

/// One thing that is wrong.
///
/// Shown as `LINE:COLUMN: KEY: MESSAGE, did you mean SUGGESTION?`. Never repeats a value that can be a secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// Line from 1; 0 when the problem has no place, such as a file that cannot be read.
    pub line: usize,
    /// Column from 1, in characters; 0 when the problem has no place.
    pub column: usize,
    /// The key, such as `pools[0].workers[1].url`; empty for the whole file or a syntax error.
    pub key: String,
    /// What is wrong.
    pub message: String,
    /// What was probably meant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub suggestion: Option<String>,
}

/// Everything that is wrong with one configuration, in the order of the file. Never empty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Errors {
    /// The file, or what else the configuration was read from.
    pub source: String,
    /// The problems.
    pub problems: Vec<Problem>,
}

/// A place in the text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) line: usize,
    pub(crate) column: usize,
}

/// Finds line and column of a byte offset.
pub(crate) struct Places<'a> {
    text: &'a str,
    line_starts: Vec<usize>,
}

// === impl Problem ===

impl Problem {
    pub(crate) fn new(place: Place, key: impl Into<String>, message: impl Into<String>) -> Self {
        Self { line: place.line, column: place.column, key: key.into(), message: message.into(), suggestion: None }
    }

    pub(crate) fn with_suggestion(mut self, suggestion: Option<String>) -> Self {
        self.suggestion = suggestion;
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line > 0 {
            write!(f, "{}:{}: ", self.line, self.column)?;
        }
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.message)?;
        match &self.suggestion {
            Some(suggestion) => write!(f, ", did you mean `{suggestion}`?"),
            None => Ok(()),
        }
    }
}

// === impl Errors ===

impl Errors {
    pub(crate) fn new(source: &str, mut problems: Vec<Problem>) -> Self {
        problems.sort_by_key(|problem| (problem.line, problem.column));
        Self { source: source.to_owned(), problems }
    }

    pub(crate) fn one(source: &str, problem: Problem) -> Self {
        Self::new(source, vec![problem])
    }
}

impl fmt::Display for Errors {
    /// One line for each problem, `SOURCE:LINE:COLUMN: KEY: MESSAGE`, without a line break at the end.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.problems.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            let space = if problem.line > 0 { "" } else { " " };
            write!(f, "{}:{space}{problem}", self.source)?;
        }
        Ok(())
    }
}

impl std::error::Error for Errors {}

// === impl Places ===

impl<'a> Places<'a> {
    pub(crate) fn new(text: &'a str) -> Self {
        let after_breaks = text.bytes().enumerate().filter(|(_, b)| *b == b'\n').map(|(at, _)| at + 1);
        Self { text, line_starts: std::iter::once(0).chain(after_breaks).collect() }
    }

    pub(crate) fn at(&self, offset: usize) -> Place {
        let line = self.line_starts.partition_point(|start| *start <= offset);
        let start = self.line_starts.get(line.saturating_sub(1)).copied().unwrap_or(0);
        let before = self.text.get(start..offset).map_or(0, |text| text.chars().count());
        Place { line, column: before + 1 }
    }
}
