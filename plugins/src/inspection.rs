//! What can be said of a module before it is started.

use std::sync::Arc;
use std::time::{Duration, Instant};

use wasmtime::{ExternType, Store};

use crate::abi::{AbiVersion, MARKER_PREFIX};
use crate::callback::{Callback, CallbackSet, abi_version, describe};
use crate::capability::Capability;
use crate::host::{Host, Loaded};
use crate::link_check;
use crate::runtime::Runtime;
use crate::services::SharedState;
use crate::spec::PluginSpec;

/// A module as its imports and exports show it.
#[derive(Clone, Debug)]
pub struct Inspection {
    /// The ABI version that it announces, or what is wrong with what it announces.
    pub abi: Result<AbiVersion, String>,
    /// The callbacks it exports, or which of its exports has a wrong type.
    pub callbacks: Result<Vec<Callback>, String>,
    /// Names of all its exports.
    pub exports: Vec<String>,
    /// What it imports, in its order.
    pub imports: Vec<Import>,
    /// Pages of 64 KiB that its memory has at the start, and may have at most if it says so; nothing without a memory.
    pub memory_pages: Option<(u64, Option<u64>)>,
    /// What compiling it took, or loading it from the cache.
    pub compile: Duration,
    /// Whether it came from the cache.
    pub from_cache: bool,
}

/// One import.
#[derive(Clone, Debug)]
pub struct Import {
    /// `MODULE.NAME`
    pub name: String,
    /// Its type, as WebAssembly text has it.
    pub ty: String,
    /// What it is for; nothing if this host does not know it.
    pub capability: Option<Capability>,
    /// Why it cannot be linked.
    pub problem: Option<String>,
    /// Whether a plugin with [`PluginSpec::stub_unknown_imports`] starts all the same.
    pub can_be_stubbed: bool,
}

// === impl Inspection ===

impl Inspection {
    /// The capabilities of its imports, each once.
    pub fn capabilities(&self) -> Vec<Capability> {
        let mut all: Vec<_> = self.imports.iter().filter_map(|import| import.capability).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Everything that keeps it from being started, with or without [`PluginSpec::stub_unknown_imports`].
    pub fn problems(&self, stub_unknown_imports: bool) -> Vec<String> {
        let abi = self.abi.as_ref().err().cloned();
        let callbacks = self.callbacks.as_ref().err().cloned();
        let memory = self.memory_pages.is_none().then(|| "no export `memory`: nothing can be handed to it".to_owned());
        let imports = self.imports.iter().filter(|import| !(stub_unknown_imports && import.can_be_stubbed));
        let imports = imports.filter_map(|import| import.problem.clone());
        abi.into_iter().chain(callbacks).chain(memory).chain(imports).collect()
    }
}

impl Runtime {
    /// Compiles a module, unless the cache has it, and looks at what it imports and exports. Nothing of it runs.
    ///
    /// # Errors
    /// Text that says why the bytes are not a module that can run here.
    pub fn inspect(&self, wasm: &[u8]) -> Result<Inspection, String> {
        let loaded_before = self.module_counts().1;
        let started = Instant::now();
        let module = self.module_to_inspect(wasm)?;
        let compile = started.elapsed();
        let abi = abi_version(&module);
        let services = Arc::new(SharedState::default());
        let version = abi.clone().unwrap_or(AbiVersion::V0_2_1);
        let spec = PluginSpec { dialect: version.dialect(), ..PluginSpec::new("inspection", Vec::new()) };
        let linker = self.linker(spec.dialect);
        let host = Host::new(Arc::new(Loaded::new(spec, version, CallbackSet::default(), services, Arc::default())), 0);
        let mut store = Store::new(self.engine(), host);
        let imports = module
            .imports()
            .map(|import| {
                let problem = link_check::problem(linker, &import, &mut store);
                Import {
                    name: format!("{}.{}", import.module(), import.name()),
                    ty: describe(&import.ty()),
                    capability: Capability::of(import.module(), import.name()),
                    can_be_stubbed: problem.as_ref().is_some_and(|problem| problem.stub.is_some()),
                    problem: problem.map(|problem| problem.text),
                }
            })
            .collect();
        let memory_pages = match module.get_export("memory") {
            Some(ExternType::Memory(memory)) => Some((memory.minimum(), memory.maximum())),
            _ => None,
        };
        Ok(Inspection {
            abi,
            callbacks: CallbackSet::of(&module)
                .map(|set| Callback::ALL.into_iter().filter(|callback| set.contains(*callback)).collect()),
            exports: module.exports().map(|export| export.name().to_owned()).collect(),
            imports,
            memory_pages,
            compile,
            from_cache: self.module_counts().1 > loaded_before,
        })
    }
}

impl Inspection {
    /// Exports that are neither callbacks, markers nor what every toolchain adds; hosts other than this one may use them.
    pub fn other_exports(&self) -> impl Iterator<Item = &str> {
        let known = |name: &str| {
            Callback::ALL.iter().any(|callback| callback.export() == name)
                || name.starts_with(MARKER_PREFIX)
                || matches!(name, "memory" | "malloc" | "proxy_on_memory_allocate" | "_initialize" | "_start" | "main")
        };
        self.exports.iter().map(String::as_str).filter(move |name| !known(name))
    }
}
