//! The environment that the gateway lends to filters, with a list of the properties that one asked for.

use super::super::trace::{Access, Accesses, name_of};
use crate::filters::FilterEnv;
use std::borrow::Cow;
use std::ops::Range;
use turnstile_fleet::decision::WriteError;
use turnstile_plugins::{BufferType, HeaderPairs, MapType, Status, StreamEnv};

/// An exchange as a filter sees it.
pub struct Watched {
    /// What answers.
    pub exchange: FilterEnv,
    /// What was asked; nothing where nobody wants to know.
    pub accesses: Option<Accesses>,
}

impl StreamEnv for Watched {
    fn property(&mut self, path: &[u8]) -> Option<Cow<'_, [u8]>> {
        let value = self.exchange.property(path);
        // What the plugin host answers by itself is not the exchange's.
        if let Some(accesses) = &self.accesses
            && (value.is_some() || !path.starts_with(b"plugin_"))
        {
            accesses.add(Access::Read { name: name_of(path), value: value.as_deref().map(<[u8]>::to_vec) });
        }
        value
    }

    fn set_property(&mut self, path: &[u8], value: &[u8]) -> Result<(), Status> {
        let written = self.exchange.set_property(path, value);
        if let Some(accesses) = &self.accesses {
            let refused = written.err().map(|_| WriteError::TooMany);
            accesses.add(Access::Write { name: name_of(path), value: value.to_vec(), refused });
        }
        written
    }

    fn header_map(&mut self, map: MapType) -> Option<&mut dyn HeaderPairs> {
        self.exchange.header_map(map)
    }

    fn buffer(&mut self, buffer: BufferType) -> Option<&[u8]> {
        self.exchange.buffer(buffer)
    }

    fn replace_buffer(&mut self, buffer: BufferType, range: Range<usize>, data: &[u8]) -> Result<(), Status> {
        self.exchange.replace_buffer(buffer, range, data)
    }

    fn call_foreign(&mut self, name: &str, arguments: &[u8]) -> Result<Cow<'_, [u8]>, Status> {
        let result = self.exchange.call_foreign(name, arguments);
        if let Some(accesses) = &self.accesses {
            accesses.add(Access::Call {
                name: name.to_owned(),
                arguments: arguments.to_vec(),
                result: result.as_deref().map(<[u8]>::to_vec).map_err(|status| *status),
            });
        }
        result
    }

    fn upstream_hosts(&mut self) -> Option<Vec<(String, String)>> {
        self.exchange.upstream_hosts()
    }

    fn override_host(&mut self, address: &[u8]) -> Result<(), Status> {
        self.exchange.override_host(address)
    }
}
