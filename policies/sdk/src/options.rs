//! A plugin's configuration table, read strictly and with errors that name the option.
//!
//! Any type that derives `serde::Deserialize` can be read. The reader is this module's own: serde_json's knows where in
//! the text an error is, but not in which option, and the author of the configuration never saw that text. It also needs
//! the printing of floats, which is a quarter of a module's size.

use std::fmt;

use serde::Deserialize;
use serde::de::{
    self, DeserializeOwned, DeserializeSeed, EnumAccess, Expected, IntoDeserializer, MapAccess, SeqAccess, Unexpected,
    VariantAccess, Visitor,
};
use serde_json::Value;

/// For policies without options: any key is an error.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NoOptions {}

/// Why a configuration was refused.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OptionError {
    /// Path of the option within the plugin's table, such as `margin_ms` or `rules[2].labels`; empty for the whole table.
    pub option: String,
    /// What is wrong with it.
    pub message: String,
}

/// Reads options from the JSON the host passes at configure time. No text at all is the same as `{}`.
///
/// # Errors
/// Names the first option that is unknown, missing or has a wrong value. For an unknown one the message lists those known.
pub fn parse_options<T: DeserializeOwned>(configuration: &[u8]) -> Result<T, OptionError> {
    let text = if configuration.trim_ascii().is_empty() { b"{}" } else { configuration };
    let table = value(text)?;
    if !table.is_object() {
        return Err(OptionError::message(format!("expected a table, found {}", kind(&table))));
    }
    T::deserialize(Reader(&table))
}

/// Reads any JSON.
pub(crate) fn read_json<T: DeserializeOwned>(text: &[u8]) -> Result<T, OptionError> {
    T::deserialize(Reader(&value(text)?))
}

fn value(text: &[u8]) -> Result<Value, OptionError> {
    serde_json::from_slice(text)
        .map_err(|error| OptionError::message(format!("not JSON, column {} of line {}", error.column(), error.line())))
}

// === impl OptionError ===

impl OptionError {
    fn message(message: String) -> Self {
        OptionError { option: String::new(), message }
    }

    /// The error, seen from the table that has it under `key`.
    fn below(mut self, key: &str) -> Self {
        let separator = if self.option.is_empty() || self.option.starts_with('[') { "" } else { "." };
        self.option = format!("{key}{separator}{}", self.option);
        self
    }
}

impl fmt::Display for OptionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.option.is_empty() {
            write!(f, "configuration: {}", self.message)
        } else {
            write!(f, "option `{}`: {}", self.option, self.message)
        }
    }
}

impl std::error::Error for OptionError {}

impl de::Error for OptionError {
    fn custom<M: fmt::Display>(message: M) -> Self {
        OptionError::message(message.to_string())
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        OptionError::message(format!("expected {expected}, found {}", found_kind(found)))
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        match found {
            Unexpected::Unsigned(number) => OptionError::message(format!("expected {expected}, found {number}")),
            Unexpected::Signed(number) => OptionError::message(format!("expected {expected}, found {number}")),
            Unexpected::Str(text) => OptionError::message(format!("expected {expected}, found \"{text}\"")),
            _ => Self::invalid_type(found, expected),
        }
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        OptionError::message(format!("\"{variant}\" is none of {}", list(expected)))
    }

    fn unknown_field(field: &str, expected: &'static [&'static str]) -> Self {
        let message = match expected {
            [] => "unknown; there are no options".to_owned(),
            _ => format!("unknown; known are {}", list(expected)),
        };
        OptionError { option: field.to_owned(), message }
    }

    fn missing_field(field: &'static str) -> Self {
        OptionError { option: field.to_owned(), message: "missing".to_owned() }
    }
}

fn list(names: &[&str]) -> String {
    names.join(", ")
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "a table",
    }
}

/// In words, without the value: printing floats alone would add a tenth to a module.
fn found_kind(found: Unexpected<'_>) -> &'static str {
    match found {
        Unexpected::Bool(_) => "a boolean",
        Unexpected::Unsigned(_) => "a whole number",
        Unexpected::Signed(_) => "a negative number",
        Unexpected::Float(_) => "a number with a fraction",
        Unexpected::Char(_) | Unexpected::Str(_) => "a text",
        Unexpected::Seq => "a list",
        Unexpected::Map => "a table",
        Unexpected::Unit | Unexpected::Option => "null",
        _ => "something else",
    }
}

/// Reads a value into whatever a type asks for.
struct Reader<'v>(&'v Value);

struct Items<'v>(std::iter::Enumerate<std::slice::Iter<'v, Value>>);

struct Entries<'v> {
    entries: serde_json::map::Iter<'v>,
    current: Option<(&'v String, &'v Value)>,
}

struct Variant<'v>(&'v str);

// === impl Reader ===

impl<'de, 'v> de::Deserializer<'de> for Reader<'v> {
    type Error = OptionError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, OptionError> {
        match self.0 {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Number(number) => {
                if let Some(value) = number.as_u64() {
                    visitor.visit_u64(value)
                } else if let Some(value) = number.as_i64() {
                    visitor.visit_i64(value)
                } else {
                    visitor.visit_f64(number.as_f64().unwrap_or(f64::NAN))
                }
            }
            Value::String(text) => visitor.visit_str(text),
            Value::Array(items) => visitor.visit_seq(Items(items.iter().enumerate())),
            Value::Object(table) => visitor.visit_map(Entries { entries: table.iter(), current: None }),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, OptionError> {
        if self.0.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, OptionError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, OptionError> {
        match self.0 {
            Value::String(name) => visitor.visit_enum(Variant(name)),
            other => Err(OptionError::message(format!("expected one of {}, found {}", list(variants), kind(other)))),
        }
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map struct identifier ignored_any
    }
}

// === impl Items ===

impl<'de, 'v> SeqAccess<'de> for Items<'v> {
    type Error = OptionError;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, OptionError> {
        let Some((at, value)) = self.0.next() else { return Ok(None) };
        seed.deserialize(Reader(value)).map(Some).map_err(|error| error.below(&format!("[{at}]")))
    }
}

// === impl Entries ===

impl<'de, 'v> MapAccess<'de> for Entries<'v> {
    type Error = OptionError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, OptionError> {
        self.current = self.entries.next();
        let Some((key, _)) = self.current else { return Ok(None) };
        seed.deserialize(key.as_str().into_deserializer()).map(Some)
    }

    fn next_value_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<T::Value, OptionError> {
        let Some((key, value)) = self.current else { return Err(OptionError::message("value without key".to_owned())) };
        seed.deserialize(Reader(value)).map_err(|error| error.below(key))
    }
}

// === impl Variant ===

impl<'de, 'v> EnumAccess<'de> for Variant<'v> {
    type Error = OptionError;
    type Variant = Self;

    fn variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<(T::Value, Self), OptionError> {
        let name: de::value::StrDeserializer<'_, OptionError> = self.0.into_deserializer();
        Ok((seed.deserialize(name)?, self))
    }
}

/// Only variants without content: an option is a word, or it is a table of its own.
impl<'de, 'v> VariantAccess<'de> for Variant<'v> {
    type Error = OptionError;

    fn unit_variant(self) -> Result<(), OptionError> {
        Ok(())
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, _: T) -> Result<T::Value, OptionError> {
        Err(self.without_content())
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, _: V) -> Result<V::Value, OptionError> {
        Err(self.without_content())
    }

    fn struct_variant<V: Visitor<'de>>(self, _: &'static [&'static str], _: V) -> Result<V::Value, OptionError> {
        Err(self.without_content())
    }
}

impl Variant<'_> {
    fn without_content(&self) -> OptionError {
        OptionError::message(format!("\"{}\" needs a value, which options of this kind cannot have", self.0))
    }
}

#[cfg(test)]
#[path = "options_tests.rs"]
mod tests;
