//! Compiled modules on disk.
//!
//! A module's file is named by the SHA-256 of its wasm and by the engine's settings; beside it stands its own checksum.
//! The directory must be private to this user, see [`precompiled`](crate::precompiled) for why.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::hash::{Hash, Hasher};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use wasmtime::{Engine, Module};

use crate::precompiled;
use crate::private_dir::PrivateDir;

/// Most compiled modules kept; the oldest go first.
const MAX_MODULES: usize = 64;
const EXTENSION: &str = "cwasm";
const CHECKSUM_EXTENSION: &str = "sha256";

/// A private directory of compiled modules.
#[derive(Debug)]
pub(crate) struct CompileCache {
    dir: PrivateDir,
    settings: String,
}

impl CompileCache {
    /// Opens a directory, making it if it is missing.
    ///
    /// # Errors
    /// Text that says why the directory cannot be trusted or used.
    pub(crate) fn open(dir: &Path, engine: &Engine) -> Result<Self, String> {
        Ok(Self { dir: PrivateDir::open(dir)?, settings: settings_name(engine) })
    }

    /// The compiled form of these bytes, if it is here and sound. A file that is not sound is removed.
    pub(crate) fn load(&self, engine: &Engine, wasm: &[u8]) -> Option<Module> {
        let path = self.path(wasm);
        if !path.exists() {
            return None;
        }
        let loaded = self
            .check(&path)
            .and_then(|()| precompiled::load(engine, &path).map_err(|error| io::Error::other(format!("{error:#}"))));
        match loaded {
            Ok(module) => Some(module),
            Err(error) => {
                tracing::warn!(file = %path.display(), %error, "compiled plugin is not sound; compiling again");
                let _ = fs::remove_file(&path);
                let _ = fs::remove_file(path.with_extension(CHECKSUM_EXTENSION));
                None
            }
        }
    }

    fn check(&self, path: &Path) -> io::Result<()> {
        self.dir.check(path)?;
        let noted = fs::read(path.with_extension(CHECKSUM_EXTENSION))?;
        let mut file = File::open(path)?;
        let mut digest = Sha256::new();
        let mut chunk = vec![0; 256 << 10];
        loop {
            let n = file.read(&mut chunk)?;
            if n == 0 {
                break;
            }
            digest.update(chunk.get(..n).unwrap_or_default());
        }
        if noted != hex(&digest.finalize()).as_bytes() {
            return Err(io::Error::other("checksum does not match"));
        }
        Ok(())
    }

    /// Keeps a compiled module.
    ///
    /// # Errors
    /// Text of the IO error; the cache is as before then.
    pub(crate) fn store(&self, module: &Module, wasm: &[u8]) -> Result<(), String> {
        let compiled = module.serialize().map_err(|error| format!("{error:#}"))?;
        let path = self.path(wasm);
        let write = || -> io::Result<()> {
            // The checksum first: a module without one is not loaded.
            self.dir.write(&path.with_extension(CHECKSUM_EXTENSION), checksum(&compiled).as_bytes())?;
            self.dir.write(&path, &compiled)
        };
        write().map_err(|error| error.to_string())?;
        self.prune().map_err(|error| error.to_string())
    }

    fn prune(&self) -> io::Result<()> {
        for path in self.dir.surplus(EXTENSION, MAX_MODULES)? {
            fs::remove_file(path.with_extension(CHECKSUM_EXTENSION))?;
            fs::remove_file(path)?;
        }
        Ok(())
    }

    /// The file of these bytes, whether it is there or not.
    pub(crate) fn path(&self, wasm: &[u8]) -> PathBuf {
        self.dir.path().join(named(wasm, &self.settings))
    }
}

/// The name of these bytes' file in any cache directory.
pub(crate) fn file_name(engine: &Engine, wasm: &[u8]) -> String {
    named(wasm, &settings_name(engine))
}

/// What stands in the file beside a compiled module.
pub(crate) fn checksum(compiled: &[u8]) -> String {
    hex(&Sha256::digest(compiled))
}

fn named(wasm: &[u8], settings: &str) -> String {
    format!("{}-{settings}.{EXTENSION}", hex(&Sha256::digest(wasm)))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The engine's version and settings as 16 hex digits, the same in every process.
fn settings_name(engine: &Engine) -> String {
    struct Fingerprint(Sha256);
    impl Hasher for Fingerprint {
        fn write(&mut self, bytes: &[u8]) {
            self.0.update(bytes);
        }

        fn finish(&self) -> u64 {
            let digest = self.0.clone().finalize();
            digest.first_chunk::<8>().map_or(0, |head| u64::from_be_bytes(*head))
        }
    }
    let mut fingerprint = Fingerprint(Sha256::new());
    engine.precompile_compatibility_hash().hash(&mut fingerprint);
    format!("{:016x}", fingerprint.finish())
}

#[cfg(test)]
#[path = "compile_cache_tests.rs"]
mod tests;
