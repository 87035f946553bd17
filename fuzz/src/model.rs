//! The body as serde_json reads it: what the scanner is held against.

use std::fmt;

use serde::de::{Deserializer as _, MapAccess, Visitor};
use serde_json::value::RawValue;

/// A top-level member as serde_json reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member<'a> {
    pub(crate) key: String,
    /// Opening quote of the key.
    pub(crate) start: usize,
    /// First byte of the value.
    pub(crate) value: usize,
    /// The value's text.
    pub(crate) raw: &'a str,
}

impl Member<'_> {
    /// Just behind the value.
    pub(crate) fn end(&self) -> usize {
        self.value + self.raw.len()
    }
}

/// The members of a body in its order; none if serde_json does not take it for an object.
pub(crate) fn members(body: &[u8]) -> Option<Vec<Member<'_>>> {
    struct All<'a>(&'a [u8]);

    impl<'de> Visitor<'de> for All<'de> {
        type Value = Vec<Member<'de>>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut list = Vec::new();
            let mut behind = 0;
            while let Some((key, raw)) = map.next_entry::<String, &'de RawValue>()? {
                let raw = raw.get();
                let value = raw.as_ptr() as usize - self.0.as_ptr() as usize;
                // Between two values stand white space, a brace or comma, and the key.
                let start = behind + self.0[behind..value].iter().position(|b| *b == b'"').expect("a key has a quote");
                behind = value + raw.len();
                list.push(Member { key, start, value, raw });
            }
            Ok(list)
        }
    }

    let mut deserializer = serde_json::Deserializer::from_slice(body);
    let list = deserializer.deserialize_map(All(body)).ok()?;
    deserializer.end().ok()?;
    Some(list)
}
