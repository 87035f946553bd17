//! What a policy did with its host: every property, header and function that it asked for, in order.
//!
//! The environment below it is the one that the gateway lends to policies, so what a policy is told here is what it is
//! told there.

use crate::policy::headers::PolicyHeaders;
use crate::policy::{PolicyEnv, RequestHead, bulk, facts};
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::sync::Arc;
use turnstile_fleet::decision::WriteError;
use turnstile_plugins::{HeaderPairs, MapType, Status, StreamEnv};

/// Accesses that are remembered; what is beyond is only counted.
const MAX_ACCESSES: usize = 10_000;
/// Bytes of values that are remembered, over all of them.
const MAX_BYTES: usize = 16 << 20;
/// Longest value that is shown, bytes.
const MAX_SHOWN: usize = 64 << 10;

/// One thing that a policy asked of its host.
#[derive(Debug, Clone, PartialEq)]
pub enum Access {
    /// It read a property.
    Read {
        /// Its name, dotted.
        name: String,
        /// What it was given; nothing for NOT_FOUND.
        value: Option<Vec<u8>>,
    },
    /// It wrote a property.
    Write {
        /// Its name, dotted.
        name: String,
        /// What it wrote.
        value: Vec<u8>,
        /// Why the write was dropped.
        refused: Option<WriteError>,
    },
    /// It read a header by its name.
    Header {
        /// Its name.
        name: String,
        /// What it was given.
        value: Option<Vec<u8>>,
    },
    /// It called a function, other than those that read and write properties.
    Call {
        /// The function's name.
        name: String,
        /// What it was called with.
        arguments: Vec<u8>,
        /// The result, or the status.
        result: Result<Vec<u8>, Status>,
    },
}

/// The accesses of one turn.
#[derive(Debug, Clone, Default)]
pub struct Accesses {
    log: Arc<Mutex<Log>>,
}

#[derive(Debug, Default)]
struct Log {
    list: Vec<Access>,
    bytes: usize,
    left_out: u64,
}

/// A policy's environment that remembers what is asked of it.
pub struct Traced {
    /// What answers.
    pub env: PolicyEnv,
    headers: TracedHeaders,
    accesses: Accesses,
}

struct TracedHeaders {
    headers: PolicyHeaders,
    accesses: Accesses,
}

// === impl Accesses ===

impl Accesses {
    /// Remembers one, if there is room.
    pub fn add(&self, access: Access) {
        let mut log = self.log.lock();
        let bytes = log.bytes.saturating_add(access.size());
        if log.list.len() < MAX_ACCESSES && bytes <= MAX_BYTES {
            log.bytes = bytes;
            log.list.push(access);
        } else {
            log.left_out += 1;
        }
    }

    /// What there is so far.
    pub fn list(&self) -> Vec<Access> {
        self.log.lock().list.clone()
    }

    /// How many were left out.
    pub fn left_out(&self) -> u64 {
        self.log.lock().left_out
    }
}

// === impl Access ===

impl Access {
    fn size(&self) -> usize {
        match self {
            Self::Read { name, value } | Self::Header { name, value } => {
                name.len() + value.as_ref().map_or(0, Vec::len)
            }
            Self::Write { name, value, .. } => name.len() + value.len(),
            Self::Call { name, arguments, result } => {
                name.len() + arguments.len() + result.as_ref().map_or(0, Vec::len)
            }
        }
    }

    /// As JSON, for the report of one turn.
    pub fn to_json(&self) -> Value {
        match self {
            Self::Read { name, value } => json!({"read": name, "value": value.as_deref().map(shown)}),
            Self::Header { name, value } => json!({"header": name, "value": value.as_deref().map(shown)}),
            Self::Write { name, value, refused: None } => json!({"write": name, "value": shown(value)}),
            Self::Write { name, value, refused: Some(cause) } => {
                json!({"write": name, "value": shown(value), "refused": cause.label(), "why": cause.to_string()})
            }
            Self::Call { name, arguments, result } => {
                let (status, value) = match result {
                    Ok(value) => ("OK".to_owned(), shown(value)),
                    Err(status) => (format!("{status:?}"), Value::Null),
                };
                json!({"call": name, "arguments": shown(arguments), "status": status, "result": value})
            }
        }
    }
}

/// Text as it is; anything else by its length.
fn shown(value: &[u8]) -> Value {
    match std::str::from_utf8(value) {
        Ok(text) if text.len() <= MAX_SHOWN && !text.contains('\0') => Value::from(text),
        _ => json!({"bytes": value.len()}),
    }
}

// === impl Traced ===

impl Traced {
    /// Remembers in `accesses` what is asked of `env`, whose request has `head`.
    pub fn new(env: PolicyEnv, head: RequestHead) -> Self {
        let accesses = Accesses::default();
        let headers = TracedHeaders { headers: PolicyHeaders(head), accesses: accesses.clone() };
        Self { env, headers, accesses }
    }

    /// What was asked so far.
    pub fn accesses(&self) -> &Accesses {
        &self.accesses
    }
}

/// A path as a reader knows it, however the guest wrote it.
pub fn name_of(path: &[u8]) -> String {
    let mut buffer = [0; facts::MAX_PATH];
    match facts::dotted(path, &mut buffer) {
        Some(name) => name.to_owned(),
        None => String::from_utf8_lossy(path.get(..facts::MAX_PATH).unwrap_or(path)).replace('\0', "."),
    }
}

impl StreamEnv for Traced {
    fn property(&mut self, path: &[u8]) -> Option<Cow<'_, [u8]>> {
        let value = self.env.property(path);
        // What the plugin host answers by itself is no fact.
        if value.is_some() || !path.starts_with(b"plugin_") {
            self.accesses.add(Access::Read { name: name_of(path), value: value.as_deref().map(<[u8]>::to_vec) });
        }
        value
    }

    fn set_property(&mut self, path: &[u8], value: &[u8]) -> Result<(), Status> {
        let written = self.env.set_property(path, value);
        // The environment tells of a dropped write only here: the guest gets OK.
        let refused = self.env.dropped.pop().map(|(_, cause)| cause);
        let refused = refused.or(written.err().map(|_| WriteError::UnknownName));
        self.accesses.add(Access::Write { name: name_of(path), value: value.to_vec(), refused });
        written
    }

    fn header_map(&mut self, map: MapType) -> Option<&mut dyn HeaderPairs> {
        match map {
            MapType::RequestHeaders => Some(&mut self.headers),
            _ => self.env.header_map(map),
        }
    }

    fn call_foreign(&mut self, name: &str, arguments: &[u8]) -> Result<Cow<'_, [u8]>, Status> {
        match name {
            // Through this environment, so that each property is seen.
            "turnstile.read" => {
                let hidden = self.env.hidden;
                bulk::read(self, arguments, hidden).map(Cow::Owned)
            }
            "turnstile.write" => bulk::write(self, arguments).map(Cow::Owned),
            _ => {
                let result = self.env.call_foreign(name, arguments);
                self.accesses.add(Access::Call {
                    name: name.to_owned(),
                    arguments: arguments.to_vec(),
                    result: result.as_deref().map(<[u8]>::to_vec).map_err(|status| *status),
                });
                result
            }
        }
    }
}

// === impl TracedHeaders ===

impl HeaderPairs for TracedHeaders {
    fn len(&self) -> usize {
        self.headers.len()
    }

    fn for_each(&self, each: &mut dyn FnMut(&[u8], &[u8])) {
        // The host counts the pairs by itself, so this does not tell that the policy looked at them.
        self.headers.for_each(each);
    }

    fn get(&self, name: &[u8]) -> Option<Cow<'_, [u8]>> {
        let value = self.headers.get(name);
        let name = String::from_utf8_lossy(name).to_ascii_lowercase();
        self.accesses.add(Access::Header { name, value: value.as_deref().map(<[u8]>::to_vec) });
        value
    }

    fn add(&mut self, name: &[u8], value: &[u8]) -> Result<(), Status> {
        self.headers.add(name, value)
    }

    fn replace(&mut self, name: &[u8], value: &[u8]) -> Result<(), Status> {
        self.headers.replace(name, value)
    }

    fn remove(&mut self, name: &[u8]) -> Result<(), Status> {
        self.headers.remove(name)
    }

    fn replace_all(&mut self, pairs: &[(&[u8], &[u8])]) -> Result<(), Status> {
        self.headers.replace_all(pairs)
    }
}
