//! What to run: a module, its configuration and its limits.

use std::sync::Arc;

use crate::abi::Dialect;
use crate::secret_headers::SecretHeaders;

/// One configured plugin.
#[derive(Clone, Debug)]
pub struct PluginSpec {
    /// Name in the configuration; labels logs, metrics and faults.
    pub name: Arc<str>,
    /// The module: WebAssembly binary format.
    pub wasm: Arc<[u8]>,
    /// Handed to `proxy_on_configure` as it is.
    pub configuration: Vec<u8>,
    /// Handed to `proxy_on_vm_start` as it is.
    pub vm_configuration: Vec<u8>,
    /// The root context's name, readable as property `plugin_root_id`.
    pub root_id: String,
    /// Name space of shared data and queues; readable as property `plugin_vm_id`.
    pub vm_id: String,
    /// What the module sees as its WASI environment.
    pub environment: Vec<(String, String)>,
    /// Bounds on what one instance may use.
    pub limits: Limits,
    /// Number of instances, each with its own memory and lock; 0 counts as 1.
    pub shards: usize,
    /// Linear memory over which an instance is replaced by a fresh one, bytes; see [`Plugin::tick`](crate::Plugin::tick).
    pub recycle_bytes: Option<usize>,
    /// Whether each stream gets an instance of its own, started and configured for it. The shards' instances then serve no
    /// streams: only ticks and queues.
    pub stream_isolation: bool,
    /// Answers harmless mistakes with OK and a log line, because SDKs panic on anything else: a header written to a map
    /// that was already sent, a property that cannot be written, a metric too many.
    pub lenient: bool,
    /// Links imports of module `env` that this host does not know to a function that answers UNIMPLEMENTED, instead of
    /// refusing the module.
    pub stub_unknown_imports: bool,
    /// Which host the module was made for. One whose marker says Higress does not start in the standard dialect.
    pub dialect: Dialect,
    /// Headers of requests and responses that the guest neither sees nor writes.
    pub hidden_headers: SecretHeaders,
    /// Imports the guest may use, by name (`proxy_http_call`, `fd_write`); nothing: all. One that is not allowed answers
    /// INTERNAL_FAILURE, one of WASI errno 76.
    pub allowed_imports: Option<Vec<String>>,
}

impl PluginSpec {
    /// A plugin with default limits, one shard and lenient statuses; `name` is also its root id and VM id.
    pub fn new(name: impl Into<Arc<str>>, wasm: impl Into<Arc<[u8]>>) -> Self {
        let name = name.into();
        Self {
            root_id: name.to_string(),
            vm_id: name.to_string(),
            name,
            wasm: wasm.into(),
            configuration: Vec::new(),
            vm_configuration: Vec::new(),
            environment: Vec::new(),
            limits: Limits::default(),
            shards: 1,
            recycle_bytes: None,
            stream_isolation: false,
            lenient: true,
            stub_unknown_imports: false,
            dialect: Dialect::default(),
            hidden_headers: SecretHeaders::ALL,
            allowed_imports: None,
        }
    }

    /// Sets the configuration handed to `proxy_on_configure`.
    #[must_use]
    pub fn with_configuration(mut self, configuration: impl Into<Vec<u8>>) -> Self {
        self.configuration = configuration.into();
        self
    }

    /// Headers that the guest neither sees nor writes: the hidden ones, and what only plugins of another dialect may say.
    pub(crate) fn veiled_headers(&self) -> SecretHeaders {
        match self.dialect {
            Dialect::Standard => self.hidden_headers.with_targets(),
            Dialect::Higress => self.hidden_headers,
        }
    }

    /// Whether a start of the other would run as one of this does, given the same module.
    pub fn runs_as(&self, other: &Self) -> bool {
        self.configuration == other.configuration
            && self.vm_configuration == other.vm_configuration
            && self.root_id == other.root_id
            && self.vm_id == other.vm_id
            && self.environment == other.environment
            && self.limits == other.limits
            && self.shards == other.shards
            && self.recycle_bytes == other.recycle_bytes
            && self.stream_isolation == other.stream_isolation
            && self.dialect == other.dialect
            && self.hidden_headers == other.hidden_headers
            && self.allowed_imports == other.allowed_imports
            && self.stub_unknown_imports == other.stub_unknown_imports
    }

    /// Sets the number of instances.
    #[must_use]
    pub fn with_shards(mut self, shards: usize) -> Self {
        self.shards = shards;
        self
    }
}

/// Bounds on what one instance may use. The wasm stack is bounded for all plugins alike, see
/// [`RuntimeOptions::max_wasm_stack`](crate::RuntimeOptions::max_wasm_stack).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Wall time of one callback, ms. A callback over it gets a grace of 10–20 ms, then the instance is thrown away.
    pub callback_deadline_ms: u64,
    /// Wall time of the start functions, of `proxy_on_vm_start` and of `proxy_on_configure`, ms each.
    pub configure_deadline_ms: u64,
    /// Linear memory of one instance, bytes.
    pub memory_bytes: usize,
    /// Elements of one table.
    pub table_elements: usize,
    /// Log lines a second over all shards; as many may come in one burst.
    pub log_lines_per_s: u32,
    /// Largest body a guest may leave in a buffer after editing it, and most of a body that may be held for it, bytes.
    pub held_body_bytes: usize,
    /// Calls that one stream may have open.
    pub callouts_per_stream: usize,
    /// Calls that the plugin may have open, over all its instances.
    pub callouts: usize,
    /// Largest body or message that a call sends or gets, bytes.
    pub callout_body_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            callback_deadline_ms: 50,
            configure_deadline_ms: 5_000,
            // The hungriest public plugin we know needs 61 MiB to configure itself.
            memory_bytes: 128 << 20,
            table_elements: 100_000,
            log_lines_per_s: 1_000,
            held_body_bytes: 64 << 20,
            callouts_per_stream: 16,
            callouts: 1_024,
            callout_body_bytes: 4 << 20,
        }
    }
}
