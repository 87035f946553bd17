//! The one wasmtime engine of the process: compiler settings, the clock that stops guests, compiled modules.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use sha2::{Digest, Sha256};
use wasmtime::{Config, Engine, Linker, Module, OptLevel, WasmBacktraceDetails};

use crate::abi::Dialect;
use crate::compile_cache::CompileCache;
use crate::host::Host;
use crate::imports;
use crate::live::{LivePlugin, LivePlugins};

/// How often the engine's epoch advances, ms: the grain of all deadlines.
pub(crate) const EPOCH_MS: u64 = 10;

/// Settings that hold for all plugins.
#[derive(Clone, Debug)]
pub struct RuntimeOptions {
    /// Where compiled modules are kept, so that a restart need not compile. Made with mode 0700 if it is missing; not
    /// used, with a warning, if anybody else could write there. None: every start compiles.
    pub cache_dir: Option<PathBuf>,
    /// Stack that guest code may use, bytes. The threads that enter guests need more than this.
    pub max_wasm_stack: usize,
}

impl Default for RuntimeOptions {
    fn default() -> Self {
        Self { cache_dir: None, max_wasm_stack: 1 << 20 }
    }
}

/// The process's plugin runtime. Cheap to clone; clones are the same runtime, which ends with the last of them and of
/// the plugins started on it.
#[derive(Clone)]
pub struct Runtime {
    inner: Arc<Inner>,
}

struct Inner {
    engine: Engine,
    linker: Linker<Host>,
    higress: Linker<Host>,
    cache: Result<CompileCache, String>,
    compiled: AtomicU64,
    loaded: AtomicU64,
    live: LivePlugins,
    /// The module that was inspected last, with the digest of its bytes: who looks at a module starts it next.
    inspected: Mutex<Option<([u8; 32], Module)>>,
    // Last: the clock stops when nothing can run any more.
    _clock: EpochClock,
}

/// The engine could not be set up.
#[derive(Debug, thiserror::Error)]
#[error("plugin runtime cannot start: {0}")]
pub struct RuntimeError(String);

impl Runtime {
    /// Starts the engine and its clock thread.
    ///
    /// # Errors
    /// If wasmtime refuses the settings, or no thread can be started.
    pub fn new(options: RuntimeOptions) -> Result<Self, RuntimeError> {
        let fail = |error: wasmtime::Error| RuntimeError(format!("{error:#}"));
        let mut config = Config::new();
        config
            .epoch_interruption(true)
            .cranelift_opt_level(OptLevel::Speed)
            .memory_init_cow(true)
            .max_wasm_stack(options.max_wasm_stack)
            .wasm_backtrace_details(WasmBacktraceDetails::Disable)
            .wasm_backtrace_max_frames(NonZeroUsize::new(32))
            // The ABI is 32 bit and one memory; plugins need no garbage collector.
            .wasm_memory64(false)
            .wasm_multi_memory(false)
            .gc_support(false);
        let engine = Engine::new(&config).map_err(fail)?;
        let mut linker = Linker::new(&engine);
        imports::link(&mut linker).map_err(fail)?;
        let mut higress = linker.clone();
        imports::link_higress(&mut higress).map_err(fail)?;
        let cache = match options.cache_dir {
            None => Err("no directory was given".to_owned()),
            Some(dir) => CompileCache::open(&dir, &engine).inspect_err(|reason| {
                tracing::warn!(dir = %dir.display(), %reason, "compiled plugins are not kept");
            }),
        };
        let clock = EpochClock::start(engine.clone())?;
        let inner = Inner {
            engine,
            linker,
            higress,
            cache,
            compiled: AtomicU64::new(0),
            loaded: AtomicU64::new(0),
            live: LivePlugins::default(),
            inspected: Mutex::default(),
            _clock: clock,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The module of these bytes, from the cache or compiled now: 0.1 to 10 seconds.
    ///
    /// # Errors
    /// Text that says why the bytes are not a module that can run here.
    pub(crate) fn module(&self, wasm: &[u8]) -> Result<Module, String> {
        let inner = &self.inner;
        if let Some((digest, module)) = &*inner.inspected.lock()
            && *digest == digest_of(wasm)
        {
            return Ok(module.clone());
        }
        if let Some(module) = inner.cache.as_ref().ok().and_then(|cache| cache.load(&inner.engine, wasm)) {
            inner.loaded.fetch_add(1, Relaxed);
            return Ok(module);
        }
        let module = Module::from_binary(&inner.engine, wasm).map_err(|error| format!("{error:#}"))?;
        inner.compiled.fetch_add(1, Relaxed);
        if let Ok(cache) = &inner.cache
            && let Err(reason) = cache.store(&module, wasm)
        {
            tracing::warn!(%reason, "compiled plugin could not be kept");
        }
        Ok(module)
    }

    /// The same, kept in memory until another is inspected.
    pub(crate) fn module_to_inspect(&self, wasm: &[u8]) -> Result<Module, String> {
        let module = self.module(wasm)?;
        *self.inner.inspected.lock() = Some((digest_of(wasm), module.clone()));
        Ok(module)
    }

    /// Compiles a module, if need be, and keeps it in the cache, so that a later start is quick.
    ///
    /// # Errors
    /// Text that says why the bytes are not a module that can run here.
    pub fn precompile(&self, wasm: &[u8]) -> Result<(), String> {
        self.module(wasm).map(|_| ())
    }

    /// The file that the cache keeps these bytes in once they were compiled.
    ///
    /// # Errors
    /// Why compiled modules are not kept.
    pub fn cache_file(&self, wasm: &[u8]) -> Result<PathBuf, String> {
        self.inner.cache.as_ref().map(|cache| cache.path(wasm)).map_err(Clone::clone)
    }

    /// How many modules were compiled, and how many came from the cache.
    pub fn module_counts(&self) -> (u64, u64) {
        (self.inner.compiled.load(Relaxed), self.inner.loaded.load(Relaxed))
    }

    /// Every start of a plugin of which something is in memory, the oldest first.
    pub fn live(&self) -> Vec<LivePlugin> {
        self.inner.live.list()
    }

    pub(crate) fn live_plugins(&self) -> &LivePlugins {
        &self.inner.live
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.inner.engine
    }

    pub(crate) fn linker(&self, dialect: Dialect) -> &Linker<Host> {
        match dialect {
            Dialect::Standard => &self.inner.linker,
            Dialect::Higress => &self.inner.higress,
        }
    }
}

fn digest_of(wasm: &[u8]) -> [u8; 32] {
    Sha256::digest(wasm).into()
}

/// The thread that advances the epoch.
struct EpochClock {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl EpochClock {
    fn start(engine: Engine) -> Result<Self, RuntimeError> {
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let stopped = Arc::clone(&stop);
        let run = move || {
            let (stopped, changed) = &*stopped;
            let mut guard = stopped.lock();
            while !*guard {
                changed.wait_for(&mut guard, Duration::from_millis(EPOCH_MS));
                engine.increment_epoch();
            }
        };
        let thread = std::thread::Builder::new().name("plugin-epoch".to_owned()).spawn(run);
        Ok(Self { stop, thread: Some(thread.map_err(|error| RuntimeError(error.to_string()))?) })
    }
}

impl Drop for EpochClock {
    fn drop(&mut self) {
        let (stopped, changed) = &*self.stop;
        *stopped.lock() = true;
        changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// CPU time that this thread has had so far.
pub(crate) fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    let (seconds, nanoseconds) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
    Duration::new(seconds.unwrap_or_default(), nanoseconds.unwrap_or_default())
}

/// A deadline in epochs from now: at least `ms`, at most one epoch more.
pub(crate) fn epochs(ms: u64) -> u64 {
    ms.div_ceil(EPOCH_MS).saturating_add(1)
}
