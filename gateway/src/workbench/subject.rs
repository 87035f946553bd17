//! The plugin that a tool works on: its file, started as the gateway would start it, with what it logs.

use super::arguments::GivenArgs;
use super::filter::callees::Callees;
use super::meter::Meter;
use crate::module_file;
use parking_lot::Mutex;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use turnstile_config::PluginConfiguration;
use turnstile_plugins::{
    AbiVersion, CallCommand, CallbackRun, LogLevel, LogLine, Plugin, PluginServices, PluginSpec, Runtime,
    RuntimeOptions, SharedState,
};

/// How long a callback may take, ms: long enough for a slow one on a busy machine, and an end to one that never returns.
const CALLBACK_DEADLINE_MS: u64 = 2_000;
/// Log lines that are kept.
const MAX_LINES: usize = 1_000;

/// A module's file and what it is started with.
pub struct Subject {
    /// Where it was read from.
    pub path: PathBuf,
    /// Its name: the file's, without the extension.
    pub name: String,
    /// The module.
    pub wasm: Arc<[u8]>,
    /// Its configuration, as the gateway hands it over.
    pub configuration: String,
    /// Its root id.
    pub root_id: String,
    /// Whether imports that the host does not have are stubbed.
    pub stub_unknown_imports: bool,
}

/// What a plugin logged: level and text.
pub type Line = (LogLevel, String);

/// What the process offers to the plugin.
#[derive(Default)]
pub struct Services {
    shared: SharedState,
    lines: Mutex<Vec<Line>>,
    callees: Callees,
    measures: bool,
    meter: Meter,
}

/// A plugin that was started.
pub struct Started {
    /// The plugin, with one instance.
    pub plugin: Plugin,
    /// What it logs.
    pub services: Arc<Services>,
    /// What starting and configuring it took, compilation not included.
    pub took: Duration,
}

// === impl Subject ===

impl Subject {
    /// Reads a module and the file with its configuration.
    ///
    /// # Errors
    /// Which file cannot be read, or is not what it should be.
    pub fn read(path: &Path, given: &GivenArgs) -> Result<Self, String> {
        let wasm = module_file::read(path).map_err(|e| format!("{}: {e}", path.display()))?;
        let name = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        let mut subject = Self::new(path.to_owned(), name, wasm.into(), &configuration(given)?);
        if let Some(root_id) = &given.root_id {
            subject.root_id.clone_from(root_id);
        }
        subject.stub_unknown_imports = given.stub_unknown_imports;
        Ok(subject)
    }

    /// A module that is in memory.
    pub fn new(path: PathBuf, name: String, wasm: Arc<[u8]>, configuration: &PluginConfiguration) -> Self {
        let configuration = configuration.text().into_owned();
        Self { path, root_id: name.clone(), name, wasm, configuration, stub_unknown_imports: false }
    }

    /// The module's SHA-256, hexadecimal.
    pub fn digest(&self) -> String {
        Sha256::digest(&self.wasm).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Starts and configures it with the gateway's default limits.
    ///
    /// # Errors
    /// Why it does not start, with what it logged.
    pub fn start(&self, runtime: &Runtime) -> Result<Started, String> {
        self.start_among(runtime, Callees::default())
    }

    /// The same where somebody answers its calls.
    ///
    /// # Errors
    /// As with [`Subject::start`].
    pub fn start_among(&self, runtime: &Runtime, callees: Callees) -> Result<Started, String> {
        self.start_with(runtime, Services { callees, ..Services::default() })
    }

    /// The same with every callback measured, those of the start included.
    ///
    /// # Errors
    /// As with [`Subject::start`].
    pub fn start_measured(&self, runtime: &Runtime, callees: Callees) -> Result<Started, String> {
        self.start_with(runtime, Services { callees, measures: true, ..Services::default() })
    }

    fn start_with(&self, runtime: &Runtime, services: Services) -> Result<Started, String> {
        // First, so that starting takes the time that it takes in a gateway with a warm cache.
        let inspection = runtime.inspect(&self.wasm).map_err(|e| format!("{}: {e}", self.path.display()))?;
        let services = Arc::new(services);
        let mut spec =
            PluginSpec::new(self.name.as_str(), Arc::clone(&self.wasm)).with_configuration(self.configuration.clone());
        spec.root_id.clone_from(&self.root_id);
        spec.stub_unknown_imports = self.stub_unknown_imports;
        // Wall time, and the machine of a tool may be a busy one.
        spec.limits.callback_deadline_ms = CALLBACK_DEADLINE_MS;
        // A tool takes a module for what it says it is.
        spec.dialect = inspection.abi.map(AbiVersion::dialect).unwrap_or_default();
        let started = Instant::now();
        match Plugin::start(runtime, spec, Arc::clone(&services) as Arc<dyn PluginServices>) {
            Ok(plugin) => Ok(Started { plugin, services, took: started.elapsed() }),
            Err(error) => {
                let said: Vec<String> = services.take().iter().map(|line| format!("\n  {}", shown(line))).collect();
                Err(format!("{error}{}", said.concat()))
            }
        }
    }
}

/// The configuration in the file that is named for it.
fn configuration(given: &GivenArgs) -> Result<PluginConfiguration, String> {
    const WANTED: &str = "expected a JSON object or list, as the plugin's `config` (--config-text hands over any text)";
    if let Some(file) = &given.config_text {
        let fail = |e: &dyn Display| format!("--config-text: {}: {e}", file.display());
        let text = read_text(file).map_err(|e| fail(&e))?;
        return String::from_utf8(text).map(PluginConfiguration::Text).map_err(|e| fail(&e));
    }
    let Some(file) = &given.config else { return Ok(Map::new().into()) };
    let fail = |e: &dyn Display| format!("--config: {}: {e}", file.display());
    match serde_json::from_slice(&read_text(file).map_err(|e| fail(&e))?) {
        Ok(Value::Object(members)) => Ok(members.into()),
        Ok(Value::Array(items)) => Ok(PluginConfiguration::List(items)),
        Ok(_) => Err(fail(&WANTED)),
        Err(e) => Err(fail(&format_args!("{WANTED}: {e}"))),
    }
}

/// The runtime of a tool. Modules are compiled once and kept where the gateway keeps them, if there is such a place.
///
/// # Errors
/// The engine does not start.
pub fn runtime(cache_dir: Option<PathBuf>) -> Result<Runtime, String> {
    Runtime::new(RuntimeOptions { cache_dir, ..RuntimeOptions::default() }).map_err(|e| e.to_string())
}

/// The bytes of a small file; of a pipe too, so that a shell can make it up on the spot.
pub fn read_text(path: &Path) -> std::io::Result<Vec<u8>> {
    use std::io::Read;
    const MAX_BYTES: u64 = 64 << 20;
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(std::io::Error::other(format!("is larger than {} MiB", MAX_BYTES >> 20)));
    }
    Ok(bytes)
}

/// A log line for a terminal.
pub fn shown((level, text): &Line) -> String {
    format!("{}: {text}", level_name(*level))
}

/// A level's name in reports.
pub fn level_name(level: LogLevel) -> &'static str {
    match level {
        LogLevel::Trace => "trace",
        LogLevel::Debug => "debug",
        LogLevel::Info => "info",
        LogLevel::Warn => "warn",
        LogLevel::Error => "error",
        LogLevel::Critical => "critical",
    }
}

// === impl Services ===

impl Services {
    /// What was logged since the last call.
    pub fn take(&self) -> Vec<Line> {
        std::mem::take(&mut self.lines.lock())
    }

    /// Those who answer its calls.
    pub fn callees(&self) -> &Callees {
        &self.callees
    }

    /// What its callbacks took, if it was started to be measured.
    pub fn meter(&self) -> &Meter {
        &self.meter
    }
}

impl PluginServices for Services {
    fn shared(&self) -> &SharedState {
        &self.shared
    }

    fn log(&self, line: LogLine<'_>) {
        let mut lines = self.lines.lock();
        if lines.len() < MAX_LINES {
            lines.push((line.level, line.message.to_owned()));
        }
    }

    fn log_level(&self, _: &str) -> LogLevel {
        LogLevel::Debug
    }

    fn has_upstream(&self, _: &str, upstream: &str) -> bool {
        self.callees.knows(upstream)
    }

    fn measures(&self) -> bool {
        self.measures
    }

    fn ran(&self, run: CallbackRun) {
        self.meter.add(run);
    }

    fn call_out(&self, _: &str, command: CallCommand) {
        self.callees.ask(command);
    }
}
