//! A compiled module as a file that can be carried to another machine's cache.

use wasmtime::Engine;

use crate::compile_cache;
use crate::runtime::Runtime;

/// A compiled module: native code for one version of this program, one kind of processor and these engine settings.
#[derive(Clone, Debug)]
pub struct Artefact {
    /// The native code.
    pub bytes: Vec<u8>,
    /// The name that its file must have in a cache directory.
    pub file_name: String,
    /// What must stand in the file of the same name that ends in `.sha256`: without it, it is not loaded.
    pub checksum: String,
    /// What it was compiled for, as `ARCHITECTURE-…-OS`.
    pub target: String,
}

impl Runtime {
    /// Compiles a module for a cache elsewhere. A file made of it can be used by a gateway of this very version on a
    /// processor with the same features.
    ///
    /// # Errors
    /// Text that says why the bytes are not a module that can run here.
    pub fn compile(&self, wasm: &[u8]) -> Result<Artefact, String> {
        let engine: &Engine = self.engine();
        let module = self.module(wasm)?;
        let bytes = module.serialize().map_err(|error| format!("{error:#}"))?;
        Ok(Artefact {
            file_name: compile_cache::file_name(engine, wasm),
            checksum: compile_cache::checksum(&bytes),
            target: format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
            bytes,
        })
    }
}
