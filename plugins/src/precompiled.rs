//! The one place with `unsafe`: loading native code that this program wrote earlier.
//!
//! # Invariant
//! A compiled module is native code: whoever chooses its bytes owns the process. [`load`] is therefore called only by
//! [`CompileCache`](crate::compile_cache::CompileCache), with a file
//!
//! 1. in a directory that belongs to this user and that nobody else can read or write (checked when the cache is
//!    opened; its path is the operator's choice, as are the directories above it),
//! 2. that is a regular file of this user, not a link,
//! 3. whose SHA-256 is the one noted when this program wrote it: a torn or rotten file is not loaded,
//! 4. that nobody changes while it is mapped: the cache writes new names and renames them into place, and removing a
//!    mapped file leaves the mapping intact.
//!
//! wasmtime itself refuses files of other versions, settings or CPU features.
#![allow(unsafe_code)]

use std::path::Path;

use wasmtime::{Engine, Module};

/// Maps a compiled module.
///
/// # Errors
/// wasmtime's, if the file is of another version or other settings.
pub(crate) fn load(engine: &Engine, file: &Path) -> wasmtime::Result<Module> {
    // SAFETY: the file holds what `Module::serialize` returned, unchanged; see the invariant above.
    unsafe { Module::deserialize_file(engine, file) }
}
