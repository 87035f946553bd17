//! The kit's tests as data. `conformance/README.md` describes the format for authors of other hosts.

use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Behaviours that the kit has tests for are numbered from 1 to this.
pub const BEHAVIOURS: u16 = 108;

/// One test: plugins, what happens to them, and what has to come of it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// The file's name without `.toml`, which begins with the number.
    #[serde(skip)]
    pub name: String,
    /// Number of the behaviour.
    pub number: u16,
    /// The behaviour, in a sentence.
    pub behaviour: String,
    /// Where the rule comes from.
    pub rule: String,
    /// Against what it runs; absent: both.
    #[serde(default = "both")]
    pub runs_on: Vec<Mode>,
    /// Why it does not run against the other.
    pub why: Option<String>,
    /// The chain, first to last.
    pub plugins: Vec<PluginCase>,
    /// Servers that plugins may call, by name.
    #[serde(default)]
    pub callees: BTreeMap<String, Answer>,
    /// What is said of the start.
    #[serde(default)]
    pub start: Start,
    /// What happens then, in order.
    #[serde(default)]
    pub steps: Vec<Step>,
    /// What is said of the end.
    pub stop: Option<Stop>,
    /// So many pieces of an answer are shown to the first plugin, and what one costs is told, never judged.
    pub measured_pieces: Option<usize>,
    /// Keys of the gateway's configuration, by dotted name, as TOML values.
    #[serde(default)]
    pub settings: BTreeMap<String, toml::Value>,
}

/// What a test runs against.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The host library alone, with an exchange in memory.
    Host,
    /// The gateway, over sockets.
    Gateway,
}

/// A plugin of a test.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PluginCase {
    /// Its name in the test.
    #[serde(default = "probe_name")]
    pub name: String,
    /// `probe` and its variants, or a file of `conformance/guests`.
    #[serde(default = "probe_module")]
    pub module: String,
    /// What a probe does.
    pub program: Option<String>,
    /// When it runs, in the gateway: `filter`, or one of its phases for policies.
    pub phase: Option<Phase>,
    /// The host that the module was made for.
    #[serde(default)]
    pub dialect: Dialect,
    /// More keys of the configuration.
    #[serde(default)]
    pub config: serde_json::Map<String, Value>,
    /// Configuration of the virtual machine.
    #[serde(default)]
    pub vm_config: String,
    /// Name space of shared data and queues.
    pub vm_id: Option<String>,
    /// What the module sees as its WASI environment.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// What happens to a request when the plugin fails.
    #[serde(default)]
    pub on_error: OnError,
    /// Each stream gets an instance of its own.
    #[serde(default)]
    pub isolated: bool,
    /// Instances.
    #[serde(default = "one")]
    pub instances: usize,
    /// Wall time of a callback, ms. Absent: more than a busy machine needs.
    pub callback_ms: Option<u64>,
    /// Wall time of the start, ms. Absent: more than a busy machine needs.
    pub start_ms: Option<u64>,
    /// Linear memory, MiB.
    pub memory_mib: Option<u32>,
    /// Largest body that is held for the plugin, bytes.
    pub held_body: Option<usize>,
    /// Lowest level of log lines that are kept.
    pub log_level: Option<String>,
    /// More keys of the plugin's table in the gateway's configuration.
    #[serde(default)]
    pub options: BTreeMap<String, toml::Value>,
}

/// The host that a module was made for.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Dialect {
    /// Any that follows the ABI.
    #[default]
    Standard,
    /// Higress.
    Higress,
}

/// What a plugin's fault means for its request.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum OnError {
    /// It is answered with an error.
    #[default]
    Closed,
    /// It goes on without the plugin.
    Open,
    /// The gateway decides in the place of a policy.
    Fallback,
}

/// When a plugin runs, in the gateway.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// It sees requests and answers.
    Filter,
    /// It says when a request is served.
    Admit,
    /// It says where.
    Route,
    /// It sees no requests.
    Background,
}

/// What is left of the host's own files when it starts anew.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Restart {
    /// All that it kept.
    Kept,
    /// Files that are damaged.
    Damaged,
    /// Files that another version of the host has written.
    Foreign,
}

/// What is said of the start.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Start {
    /// It has to fail, with words like these.
    pub refused: Option<String>,
    /// What the guests log.
    pub log: Option<Vec<String>>,
}

/// What is said of the end.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stop {
    /// What the guests log.
    pub log: Vec<String>,
}

/// One thing that happens. Exactly one of `request`, `wait`, `plugins`, `finish`, `restart` is there.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// A client sends this.
    pub request: Option<Ask>,
    /// What the upstream answers.
    #[serde(default)]
    pub upstream: Answer,
    /// So many clients send it at a time.
    #[serde(default = "one")]
    pub clients: usize,
    /// The clients read the first piece of the answer, and the rest in the step that finishes.
    #[serde(default)]
    pub stays_open: bool,
    /// It is sent again until it comes to what is expected.
    #[serde(default)]
    pub again: bool,
    /// The upstream sends what it has held back, and the clients read it.
    pub finish: Option<bool>,
    /// The host starts anew.
    pub restart: Option<Restart>,
    /// What has to come of it.
    #[serde(default)]
    pub expect: Expect,
    /// Time passes until the guests have logged lines like these, in any order.
    pub wait: Option<Vec<String>>,
    /// The chain is replaced by this one.
    pub plugins: Option<Vec<PluginCase>>,
    /// The replacement has to be refused, with words like these.
    pub refused: Option<String>,
}

/// A request.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Ask {
    /// By which protocol.
    pub protocol: Protocol,
    /// `:method`.
    pub method: String,
    /// `:path`.
    pub path: String,
    /// Headers; values may hold `\xNN`.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Content,
    /// Trailers.
    pub trailers: Vec<(String, String)>,
    /// The client waits for `100 Continue` before it sends the body.
    pub expects_continue: bool,
    /// The client leaves as soon as the guests have logged a line like this.
    pub leaves_at: Option<String>,
}

/// HTTP version.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// HTTP/1.1.
    #[default]
    Http1,
    /// HTTP/2, prior knowledge.
    Http2,
}

/// What a server answers.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Answer {
    /// By which protocol; the upstream's has to be the same in all steps.
    pub protocol: Protocol,
    /// `:status`.
    pub status: u16,
    /// Headers.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Content,
    /// Trailers.
    pub trailers: Vec<(String, String)>,
    /// After the first piece it waits for the step that finishes.
    pub held: bool,
    /// A callee speaks TLS, with a certificate of its own for this name.
    pub tls: Option<String>,
    /// The caller verifies the certificate.
    pub verify: bool,
    /// Messages of a gRPC answer, in the place of the body.
    pub grpc: Option<Vec<String>>,
    /// A Redis server's reply to every command, in RESP, in the place of an HTTP answer.
    pub redis: Option<String>,
    /// Something else than an answer.
    pub instead: Option<Instead>,
}

/// What a server does instead of answering.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Instead {
    /// It takes no connection.
    Refuse,
    /// It never answers.
    Silence,
    /// It answers what is no HTTP.
    Garbage,
    /// It closes the connection.
    Close,
}

/// A body: text, or pieces, or `{ size = N }` for that many bytes.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// All at once, with a length.
    Text(String),
    /// Piece by piece, without a length.
    Pieces(Vec<String>),
    /// So many bytes.
    Size {
        /// How many.
        size: usize,
        /// Without a length.
        #[serde(default)]
        chunked: bool,
    },
    /// A text, compressed.
    Gzip {
        /// The text.
        gzip: String,
    },
}

/// What has to come of a request.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expect {
    /// One of these statuses.
    pub status: Option<OneOrMore<u16>>,
    /// The client gets no whole answer.
    #[serde(default)]
    pub broken: bool,
    /// Headers of the answer: all values of a name, in order.
    #[serde(default)]
    pub headers: BTreeMap<String, OneOrMore<String>>,
    /// Headers that the answer must not have.
    #[serde(default)]
    pub no_headers: Vec<String>,
    /// The body.
    pub body: Option<String>,
    /// The body's size.
    pub body_size: Option<usize>,
    /// Trailers of the answer.
    #[serde(default)]
    pub trailers: BTreeMap<String, OneOrMore<String>>,
    /// What the upstream got; `false`: nothing.
    pub upstream: Option<Got>,
    /// What callees got, in order.
    #[serde(default)]
    pub callees: BTreeMap<String, Vec<Got>>,
    /// Everything the guests log from the step's beginning to its end, in order.
    pub log: Option<Vec<String>>,
    /// As `log`, in any order.
    pub logs: Option<Vec<String>>,
    /// Lines that no guest logs.
    #[serde(default)]
    pub no_log: Vec<String>,
    /// Of a start: modules that were compiled, and that were read from the host's own files.
    pub modules: Option<(u64, u64)>,
    /// Values of plugins' metrics afterwards.
    #[serde(default)]
    pub metrics: BTreeMap<String, f64>,
}

/// What a server got.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum Got {
    /// Anything (`true`), or nothing (`false`).
    Any(bool),
    /// A request like this.
    Like(Box<GotRequest>),
}

/// A request that a server got.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GotRequest {
    /// `:method`.
    pub method: Option<String>,
    /// `:path`.
    pub path: Option<String>,
    /// Headers: all values of a name, in order.
    #[serde(default)]
    pub headers: BTreeMap<String, OneOrMore<String>>,
    /// Headers that it must not have.
    #[serde(default)]
    pub no_headers: Vec<String>,
    /// The body.
    pub body: Option<String>,
    /// The body's size.
    pub body_size: Option<usize>,
    /// Trailers.
    #[serde(default)]
    pub trailers: BTreeMap<String, OneOrMore<String>>,
}

/// One value or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum OneOrMore<T> {
    /// One.
    One(T),
    /// Several.
    More(Vec<T>),
}

fn both() -> Vec<Mode> {
    vec![Mode::Host, Mode::Gateway]
}

fn probe_name() -> String {
    "probe".into()
}

fn probe_module() -> String {
    "probe".into()
}

fn one() -> usize {
    1
}

// === impl Mode ===

impl Mode {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Host, Self::Gateway];

    /// The name in files and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Gateway => "gateway",
        }
    }
}

// === impl PluginCase ===

impl Default for PluginCase {
    fn default() -> Self {
        Self {
            name: probe_name(),
            module: probe_module(),
            program: None,
            phase: None,
            dialect: Dialect::default(),
            config: serde_json::Map::new(),
            vm_config: String::new(),
            vm_id: None,
            environment: BTreeMap::new(),
            on_error: OnError::default(),
            isolated: false,
            instances: one(),
            callback_ms: None,
            start_ms: None,
            memory_mib: None,
            held_body: None,
            log_level: None,
            options: BTreeMap::new(),
        }
    }
}

impl PluginCase {
    /// What the plugin is configured with.
    pub fn configuration(&self) -> serde_json::Map<String, Value> {
        let mut config = self.config.clone();
        if let Some(program) = &self.program {
            config.insert("program".into(), Value::String(program.clone()));
        }
        config
    }
}

// === impl Ask, Answer, Content, OneOrMore ===

impl Default for Ask {
    fn default() -> Self {
        Self {
            protocol: Protocol::Http1,
            method: "POST".into(),
            path: "/tokenize".into(),
            headers: Vec::new(),
            body: Content::Text(r#"{"prompt":"hello"}"#.into()),
            trailers: Vec::new(),
            expects_continue: false,
            leaves_at: None,
        }
    }
}

impl Default for Answer {
    fn default() -> Self {
        Self {
            protocol: Protocol::Http1,
            status: 200,
            headers: vec![("content-type".into(), "text/plain".into())],
            body: Content::Text("hello from upstream".into()),
            trailers: Vec::new(),
            held: false,
            tls: None,
            verify: true,
            grpc: None,
            redis: None,
            instead: None,
        }
    }
}

impl Content {
    /// The bytes, piece by piece.
    pub fn pieces(&self) -> Vec<Vec<u8>> {
        match self {
            Self::Text(text) if text.is_empty() => Vec::new(),
            Self::Text(text) => vec![text.clone().into_bytes()],
            Self::Pieces(pieces) => pieces.iter().map(|piece| piece.clone().into_bytes()).collect(),
            Self::Size { size, chunked: true } => filler(*size).chunks(16 * 1024).map(<[u8]>::to_vec).collect(),
            Self::Size { size, chunked: false } => vec![filler(*size)],
            Self::Gzip { gzip } => vec![compressed(gzip)],
        }
    }

    /// All bytes.
    pub fn whole(&self) -> Vec<u8> {
        self.pieces().concat()
    }

    /// The length that is told before; none for a body of unknown length.
    pub fn length(&self) -> Option<usize> {
        match self {
            Self::Text(_) | Self::Size { chunked: false, .. } | Self::Gzip { .. } => Some(self.whole().len()),
            Self::Pieces(_) | Self::Size { .. } => None,
        }
    }
}

/// A JSON object of so many bytes, if that many can be one.
fn filler(size: usize) -> Vec<u8> {
    const HEAD: &str = r#"{"prompt":""#;
    const TAIL: &str = r#""}"#;
    let Some(middle) = size.checked_sub(HEAD.len() + TAIL.len()) else { return vec![b'x'; size] };
    [HEAD.as_bytes(), &vec![b'x'; middle], TAIL.as_bytes()].concat()
}

fn compressed(text: &str) -> Vec<u8> {
    use std::io::Write;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    // Writing to memory cannot fail.
    let _ = encoder.write_all(text.as_bytes());
    encoder.finish().unwrap_or_default()
}

impl<T> OneOrMore<T> {
    /// All of them.
    pub fn all(&self) -> &[T] {
        match self {
            Self::One(one) => std::slice::from_ref(one),
            Self::More(more) => more,
        }
    }
}

/// Header values of tests as bytes: `\xNN` is a byte.
pub fn value_bytes(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("\\x") {
        bytes.extend_from_slice(before.as_bytes());
        match after.get(..2).and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = after.get(2..).unwrap_or_default();
            }
            None => {
                bytes.extend_from_slice(b"\\x");
                rest = after;
            }
        }
    }
    bytes.extend_from_slice(rest.as_bytes());
    bytes
}

/// Reads every test of a directory, in the order of their names.
///
/// # Errors
/// Text that names the file and what is wrong with it.
pub fn load(dir: &Path) -> Result<Vec<Case>, String> {
    let entries = dir.read_dir().map_err(|error| format!("{}: {error}", dir.display()))?;
    let mut paths: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "toml"));
    paths.sort();
    let cases = paths.iter().map(|path| {
        let fail = |what: String| format!("{}: {what}", path.display());
        let text = std::fs::read_to_string(path).map_err(|error| fail(error.to_string()))?;
        let mut case: Case = toml::from_str(&text).map_err(|error| fail(error.to_string()))?;
        case.name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        case.check().map_err(fail)?;
        Ok(case)
    });
    cases.collect()
}

impl Case {
    /// What the types do not say.
    fn check(&self) -> Result<(), String> {
        let number = self.name.split('-').next().and_then(|digits| digits.parse::<u16>().ok());
        if number != Some(self.number) || !(1..=BEHAVIOURS).contains(&self.number) {
            return Err(format!(
                "number = {}: the file's name has to begin with it, from 1 to {BEHAVIOURS}",
                self.number
            ));
        }
        if self.behaviour.trim().is_empty() || self.rule.trim().is_empty() {
            return Err("behaviour and rule have to say something".into());
        }
        if self.runs_on.is_empty() || (self.runs_on.len() < Mode::ALL.len() && self.why.is_none()) {
            return Err("runs_on: a test that does not run on everything has to say `why`".into());
        }
        if self.runs_on.len() == Mode::ALL.len() && self.why.is_some() {
            return Err("why: it runs on everything".into());
        }
        if self.plugins.is_empty() {
            return Err("plugins: none".into());
        }
        for (at, step) in self.steps.iter().enumerate() {
            let kinds = [
                step.request.is_some(),
                step.wait.is_some(),
                step.plugins.is_some(),
                step.finish.is_some(),
                step.restart.is_some(),
            ];
            if kinds.into_iter().filter(|there| *there).count() != 1 {
                return Err(format!("steps[{at}]: one of request, wait, plugins, finish, restart has to be there"));
            }
            if step.refused.is_some() && step.plugins.is_none() {
                return Err(format!("steps[{at}].refused: nothing is replaced"));
            }
        }
        if self.start.refused.is_none() && self.steps.is_empty() && self.start.log.is_none() && self.stop.is_none() {
            return Err("nothing is expected".into());
        }
        Ok(())
    }

    /// The largest number of a test's plugins says whether log lines carry their names.
    pub fn names_plugins(&self) -> bool {
        self.plugins.len() > 1
    }
}
