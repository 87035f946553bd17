//! The modules of the built-in policies, as committed in `policies/dist`.

use std::sync::Arc;
use turnstile_config::BuiltIn;

/// Where modules are read from instead, by file name: for tests on rebuilt ones.
pub const DIR_VARIABLE: &str = "TURNSTILE_POLICIES_DIR";

/// A built-in's module.
///
/// # Errors
/// [`DIR_VARIABLE`] is set and the module cannot be read from there.
pub fn module(name: BuiltIn) -> Result<Arc<[u8]>, String> {
    if let Some(dir) = std::env::var_os(DIR_VARIABLE) {
        let path = std::path::Path::new(&dir).join(format!("{}.wasm", name.name()));
        return std::fs::read(&path).map(Into::into).map_err(|e| format!("{DIR_VARIABLE}: {}: {e}", path.display()));
    }
    let bytes: &[u8] = match name {
        BuiltIn::PriorityQueue => include_bytes!("../../policies/dist/priority-queue.wasm"),
        BuiltIn::SessionBinding => include_bytes!("../../policies/dist/session-binding.wasm"),
        BuiltIn::KvAffinity => include_bytes!("../../policies/dist/kv-affinity.wasm"),
    };
    Ok(bytes.into())
}
