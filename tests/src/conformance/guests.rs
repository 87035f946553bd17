//! The modules that tests run.

use std::path::PathBuf;

/// Where modules lie.
#[derive(Clone, Debug)]
pub struct Guests {
    /// WebAssembly text of the kit.
    texts: PathBuf,
    /// Built modules.
    built: PathBuf,
}

impl Guests {
    /// Modules of the kit; built ones from `CONFORMANCE_GUESTS` when that is set.
    pub fn new(kit: PathBuf, built: Option<PathBuf>) -> Self {
        let texts = kit.join("guests");
        let built = built.or_else(|| std::env::var_os("CONFORMANCE_GUESTS").map(PathBuf::from));
        Self { built: built.unwrap_or_else(|| texts.clone()), texts }
    }

    /// The bytes of a module: `NAME.wat` is WebAssembly text, `NAME` a built module.
    ///
    /// # Errors
    /// Text that names the file.
    pub fn module(&self, name: &str) -> Result<Vec<u8>, String> {
        let path = match name.ends_with(".wat") {
            true => self.texts.join(name),
            false => self.built.join(format!("{name}.wasm")),
        };
        let bytes = std::fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        wat::parse_bytes(&bytes).map(|wasm| wasm.into_owned()).map_err(|error| format!("{}: {error}", path.display()))
    }
}
