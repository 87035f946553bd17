//! Reading a plugin's module from its file.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Largest module, bytes. The largest public plugins have some 20 MiB.
pub const MAX_BYTES: u64 = 64 << 20;

/// The bytes of a module's file.
///
/// # Errors
/// It cannot be read, is no regular file (a pipe would block, a device would never end), or is too large to be a module.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::other("is not a regular file"));
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(io::Error::other(format!("is larger than {} MiB", MAX_BYTES >> 20)));
    }
    Ok(bytes)
}
