//! Texts with a form of their own. The schema names the form, this table checks it.

use std::net::SocketAddr;

use crate::{
    BuiltIn, ByteSize, HeaderName, Network, PluginSource, UpstreamUrl, WorkerUrl, admission::NONE, listener::OFF,
    plugin_source::NotAPluginSource,
};

/// What is wrong with a text, and what was probably meant.
pub(crate) struct Misfit {
    pub(crate) message: String,
    pub(crate) suggestion: Option<String>,
}

/// Longest name of a pool, a plugin or a worker: it becomes the value of a label in every metric.
const MAX_NAME_BYTES: usize = 128;

/// Checks a text against a form. A form that is not known here is one that the schema has for other readers.
pub(crate) fn check(format: &str, text: &str) -> Result<(), Misfit> {
    match format {
        "socket-address" => socket_address(text, "expected an IP address and a port, such as 0.0.0.0:8080"),
        "socket-address-or-off" if text == OFF => Ok(()),
        "socket-address-or-off" => {
            socket_address(text, "expected an IP address and a port, such as 127.0.0.1:9180, or `off`")
        }
        "worker-url" => text.parse::<WorkerUrl>().map(drop).map_err(|error| Misfit::new(error.to_string())),
        "upstream-url" => text.parse::<UpstreamUrl>().map(drop).map_err(|error| Misfit::new(error.to_string())),
        "header-name" => text.parse::<HeaderName>().map(drop).map_err(|error| Misfit::new(error.to_string())),
        "network" => text.parse::<Network>().map(drop).map_err(|error| Misfit::new(error.to_string())),
        "byte-size" => text.parse::<ByteSize>().map(drop).map_err(|error| Misfit::new(error.to_string())),
        "priority-or-none" if text == NONE => Ok(()),
        "priority-or-none" => Err(Misfit::new("expected an integer or \"none\"")),
        "sha256" if text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit()) => Ok(()),
        "sha256" => Err(Misfit::new("expected a SHA-256: 64 hexadecimal digits")),
        "plugin-source" => text.parse::<PluginSource>().map(drop).map_err(plugin_source),
        "name" => name(text, |b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'), "- _ ."),
        // Policies write ids into lists with commas, and `#3` for the third worker.
        "worker-id" => name(
            text,
            |b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b':' | b'/' | b'[' | b']' | b'@'),
            "- _ . : / [ ] @",
        ),
        _ => Ok(()),
    }
}

/// The candidate that is most like the text, if any is like it at all.
pub(crate) fn closest<'a>(text: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<String> {
    // Jaro-Winkler finds swapped, doubled and missing letters, and weighs the first ones most; below this value its finds
    // look arbitrary. In short words one swap falls below it.
    const LIKE: f64 = 0.85;
    let text = text.to_ascii_lowercase();
    candidates
        .into_iter()
        .map(|candidate| (strsim::jaro_winkler(&text, candidate), candidate))
        .filter(|(likeness, candidate)| *likeness >= LIKE || strsim::damerau_levenshtein(&text, candidate) == 1)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate.to_owned())
}

fn socket_address(text: &str, message: &str) -> Result<(), Misfit> {
    text.parse::<SocketAddr>().map(drop).map_err(|_| Misfit::new(message))
}

fn plugin_source(error: NotAPluginSource) -> Misfit {
    let suggestion = match &error {
        NotAPluginSource::UnknownBuiltIn(name) => {
            closest(name, BuiltIn::ALL.map(BuiltIn::name)).map(|name| format!("builtin:{name}"))
        }
        _ => None,
    };
    Misfit { message: error.to_string(), suggestion }
}

fn name(text: &str, allowed: impl Fn(u8) -> bool, marks: &str) -> Result<(), Misfit> {
    if !text.is_empty() && text.len() <= MAX_NAME_BYTES && text.bytes().all(allowed) {
        return Ok(());
    }
    Err(Misfit::new(format!("expected letters, digits and {marks} only, 1 to {MAX_NAME_BYTES} of them")))
}

// === impl Misfit ===

impl Misfit {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), suggestion: None }
    }
}
