//! Compiling a module ahead of its use.

use super::subject::{Subject, runtime};
use crate::run::cache_dir;
use std::path::{Path, PathBuf};
use std::time::Instant;
use turnstile_config::Config;

/// Where the cache is: of a gateway with this configuration, else of one without `state.dir`.
///
/// # Errors
/// The configuration cannot be read.
pub fn cache_of(config: Option<&Path>) -> Result<Option<PathBuf>, String> {
    let config = match config {
        Some(path) => Config::load(path).map_err(|e| e.to_string())?,
        None => Config::default(),
    };
    Ok(cache_dir(&config))
}

/// Compiles into a gateway's cache. Returns what was done and what it is good for.
///
/// # Errors
/// The module cannot be compiled, or the cache not be used.
pub fn into_cache(subject: &Subject, cache: Option<PathBuf>) -> Result<String, String> {
    let Some(dir) = cache else {
        return Err("no compile cache: neither state.dir nor a home directory is known; use -o FILE".to_owned());
    };
    let runtime = runtime(Some(dir.clone()))?;
    let file = runtime.cache_file(&subject.wasm).map_err(|why| format!("{}: {why}", dir.display()))?;
    let began = Instant::now();
    runtime.precompile(&subject.wasm).map_err(|e| format!("{}: {e}", subject.path.display()))?;
    let seconds = began.elapsed().as_secs_f64();
    let (compiled, _) = runtime.module_counts();
    let size = std::fs::metadata(&file).map_err(|e| format!("{}: {e}", file.display()))?.len();
    let how = if compiled == 0 { "was there already".to_owned() } else { format!("compiled in {seconds:.2} s") };
    Ok(format!(
        "{} ({size} bytes): {how}\n\
         A gateway of version {} whose compile cache is {} loads it instead of compiling {}. Other versions, engine settings \
         and processors compile the module themselves.\n",
        file.display(),
        env!("CARGO_PKG_VERSION"),
        dir.display(),
        subject.path.display(),
    ))
}

/// Compiles into a file, with its checksum beside it. Returns what was done and what it is good for.
///
/// # Errors
/// The module cannot be compiled, or a file not be written.
pub fn into_file(subject: &Subject, out: &Path) -> Result<String, String> {
    let artefact = runtime(None)?.compile(&subject.wasm).map_err(|e| format!("{}: {e}", subject.path.display()))?;
    let checksum_file = out.with_extension("sha256");
    if checksum_file == out {
        return Err(format!("{}: the checksum goes into the file that ends in .sha256; choose another", out.display()));
    }
    let write = |path: &Path, bytes: &[u8]| std::fs::write(path, bytes).map_err(|e| format!("{}: {e}", path.display()));
    write(out, &artefact.bytes)?;
    write(&checksum_file, artefact.checksum.as_bytes())?;
    let name = artefact.file_name.as_str();
    Ok(format!(
        "{} ({} bytes) and {}: native code for {}, made by version {}\n\
         To use it, put both into the compile cache of a gateway of this version, on a processor with the same features, as \
         {name} and {}. The cache is state.dir/wasm, mode 700; a gateway checks owner, mode and checksum and compiles the \
         module itself if anything is amiss. Whoever can write there owns the gateway: carry the files as you carry the \
         gateway's own binary. They are no substitute for the .wasm file, which the configuration still names.\n",
        out.display(),
        artefact.bytes.len(),
        checksum_file.display(),
        artefact.target,
        env!("CARGO_PKG_VERSION"),
        name.replace(".cwasm", ".sha256"),
    ))
}
