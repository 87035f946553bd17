//! The parsed file as a tree whose every node knows its place and its key.

use serde_json::{Map, Number, Value};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use crate::problem::{Errors, Place, Places, Problem};

/// A value of the file.
pub(crate) struct Node {
    pub(crate) place: Place,
    /// The dotted key as the file has it, whatever was dropped around it since.
    pub(crate) key: String,
    pub(crate) data: Data,
}

pub(crate) enum Data {
    Table(Vec<Entry>),
    Array(Vec<Node>),
    String(String),
    Integer(i64),
    Float(f64),
    Boolean(bool),
    /// TOML's dates and times have no place in the configuration but in a plugin's own table, where they become text.
    Datetime(String),
}

pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) name_place: Place,
    pub(crate) node: Node,
}

/// A file with syntax errors is reported by the first of them: what follows a broken line is mostly its echo.
const MAX_SYNTAX_PROBLEMS: usize = 10;

/// Reads the text into a tree.
///
/// # Errors
/// When the text is not TOML, or holds a number that has no value here.
pub(crate) fn read(text: &str, source: &str) -> Result<Node, Errors> {
    let places = Places::new(text);
    let (table, errors) = DeTable::parse_recoverable(text);
    if !errors.is_empty() {
        let problem = |error: &toml::de::Error| {
            let place = error.span().map_or(Place::default(), |span| places.at(span.start));
            Problem::new(place, "", error.message())
        };
        let problems = errors.iter().take(MAX_SYNTAX_PROBLEMS).map(problem).collect();
        return Err(Errors::new(source, problems));
    }
    let mut reader = Reader { places, problems: Vec::new() };
    let data = reader.table(table.get_ref(), "");
    if reader.problems.is_empty() {
        Ok(Node { place: Place { line: 1, column: 1 }, key: String::new(), data })
    } else {
        Err(Errors::new(source, reader.problems))
    }
}

/// The key of an entry of a table.
pub(crate) fn join(table: &str, name: &str) -> String {
    let bare = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'));
    let name = if bare { name.to_owned() } else { format!("{name:?}") };
    if table.is_empty() { name } else { format!("{table}.{name}") }
}

struct Reader<'a> {
    places: Places<'a>,
    problems: Vec<Problem>,
}

// === impl Reader ===

impl Reader<'_> {
    fn node(&mut self, value: &Spanned<DeValue<'_>>, key: String) -> Node {
        let place = self.places.at(value.span().start);
        let data = match value.get_ref() {
            DeValue::Table(table) => self.table(table, &key),
            DeValue::Array(items) => {
                let nodes = items.iter().enumerate().map(|(index, item)| self.node(item, format!("{key}[{index}]")));
                Data::Array(nodes.collect())
            }
            DeValue::String(text) => Data::String(text.clone().into_owned()),
            DeValue::Integer(number) => match i64::from_str_radix(number.as_str(), number.radix()) {
                Ok(number) => Data::Integer(number),
                Err(_) => {
                    self.problems.push(Problem::new(place, key.as_str(), "the integer does not fit into 64 bits"));
                    Data::Integer(0)
                }
            },
            DeValue::Float(number) => match number.as_str().parse::<f64>() {
                Ok(number) if number.is_finite() => Data::Float(number),
                _ => {
                    self.problems.push(Problem::new(place, key.as_str(), "expected a finite number"));
                    Data::Float(0.0)
                }
            },
            DeValue::Boolean(value) => Data::Boolean(*value),
            DeValue::Datetime(time) => Data::Datetime(time.to_string()),
        };
        Node { place, key, data }
    }

    fn table(&mut self, table: &DeTable<'_>, key: &str) -> Data {
        let entries = table.iter().map(|(name, value)| Entry {
            name: name.get_ref().clone().into_owned(),
            name_place: self.places.at(name.span().start),
            node: self.node(value, join(key, name.get_ref())),
        });
        Data::Table(entries.collect())
    }
}

// === impl Node ===

impl Node {
    /// A node that stands in no file.
    pub(crate) fn placeless(key: impl Into<String>, data: Data) -> Self {
        Self { place: Place::default(), key: key.into(), data }
    }

    /// The value of an entry, if this is a table that has it.
    pub(crate) fn get(&self, name: &str) -> Option<&Self> {
        match &self.data {
            Data::Table(entries) => entries.iter().find(|entry| entry.name == name).map(|entry| &entry.node),
            _ => None,
        }
    }

    /// An element, if this is an array that has it.
    pub(crate) fn item(&self, index: usize) -> Option<&Self> {
        match &self.data {
            Data::Array(items) => items.get(index),
            _ => None,
        }
    }

    /// What TOML calls this kind of value, with its article.
    pub(crate) fn kind(&self) -> &'static str {
        match self.data {
            Data::Table(_) => "a table",
            Data::Array(_) => "a list",
            Data::String(_) => "a string",
            Data::Integer(_) => "an integer",
            Data::Float(_) => "a number",
            Data::Boolean(_) => "a boolean",
            Data::Datetime(_) => "a date or time",
        }
    }

    pub(crate) fn to_json(&self) -> Value {
        match &self.data {
            Data::Table(entries) => {
                Value::Object(entries.iter().map(|e| (e.name.clone(), e.node.to_json())).collect::<Map<_, _>>())
            }
            Data::Array(items) => Value::Array(items.iter().map(Self::to_json).collect()),
            Data::String(text) | Data::Datetime(text) => Value::String(text.clone()),
            Data::Integer(number) => Value::Number((*number).into()),
            Data::Float(number) => Number::from_f64(*number).map_or(Value::Null, Value::Number),
            Data::Boolean(value) => Value::Bool(*value),
        }
    }
}
