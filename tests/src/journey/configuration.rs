//! The gateway's configuration at each station, in the words of docs/writing-policies.md.

use std::fmt::Write as _;

/// The chain that serves before, and the policies that stay.
pub const BUILT_IN: &str = r#"[[plugins]]
name = "priority-queue"
wasm = "builtin:priority-queue"
phase = "admit"

[[plugins]]
name = "session-binding"
wasm = "builtin:session-binding"
phase = "route"
"#;

/// The policy whose place is taken in the end.
pub const FORMER: &str = r#"[[plugins]]
name = "kv-affinity"
wasm = "builtin:kv-affinity"
phase = "route"
"#;

/// The new one. What it may do is the line behind it.
pub const NEW: &str = r#"[[plugins]]
name = "my-policy"
wasm = "my-policy.wasm"
phase = "route"
self_test = "turn.json"
"#;

/// It is asked and not followed.
pub const SHADOW: &str = "shadow = true\n";

/// It decides for a quarter of the sessions.
pub const CANARY: &str = "canary = { of = \"kv-affinity\", percent = 25 }\n";

/// Where the new policy stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Station {
    /// It is not there.
    Before,
    /// Asked, and not followed.
    Shadow,
    /// Followed for some sessions.
    Canary,
    /// In the place of the former one.
    Promoted,
}

/// The plugins at a station.
pub fn plugins(station: Station) -> String {
    let parts: &[&str] = match station {
        Station::Before => &[BUILT_IN, FORMER],
        Station::Shadow => &[BUILT_IN, FORMER, NEW, SHADOW],
        Station::Canary => &[BUILT_IN, FORMER, NEW, CANARY],
        Station::Promoted => &[BUILT_IN, NEW],
    };
    let text = parts.concat();
    // Deadlines of a debug build on a busy machine would tell of the machine.
    let text = text.replace("phase = ", "callback_timeout_ms = 60000\nphase = ");
    text.replace("percent = 25 }", "percent = 25, max_decision_ms = 60000.0 }")
}

/// A pool. Its name is the first part of its workers' ids.
pub struct Pool<'a> {
    pub name: &'a str,
    /// The only model that it takes; nothing: any that no other pool takes.
    pub model: Option<&'a str>,
    pub workers: Vec<String>,
}

/// The whole file.
pub fn file(pools: &[Pool<'_>], station: Station) -> String {
    let mut text = "threads = 2\n[[listeners]]\naddress = \"127.0.0.1:0\"\n[admin]\naddress = \"127.0.0.1:0\"\n\
                    [logging]\naccess = \"access.log\"\nexplain_headers = true\n[state]\ndir = \"state\"\n\
                    [routing]\nload_interval_ms = 50\n"
        .to_owned();
    for pool in pools {
        // Writing to a `String` cannot fail.
        let _ = write!(text, "[[pools]]\nname = \"{}\"\n", pool.name);
        if let Some(model) = pool.model {
            let _ = writeln!(text, "models = [\"{model}\"]");
        }
        for (place, url) in pool.workers.iter().enumerate() {
            let _ = write!(text, "[[pools.workers]]\nid = \"{}-{place}\"\nurl = \"{url}\"\n", pool.name);
        }
    }
    text + &plugins(station)
}
