//! Child processes: the gateway's binary, and what a process uses as the kernel counts it.

mod gateway;

pub use gateway::{Gateway, binary};

/// Resident memory of a process, bytes.
///
/// # Errors
/// The process is gone.
pub fn resident_bytes(pid: u32) -> Result<u64, String> {
    let path = format!("/proc/{pid}/status");
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{path}: {e}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| format!("{path}: no VmRSS"))
}

/// Open file descriptors of a process.
///
/// # Errors
/// The process is gone.
pub fn open_files(pid: u32) -> Result<usize, String> {
    let path = format!("/proc/{pid}/fd");
    Ok(std::fs::read_dir(&path).map_err(|e| format!("{path}: {e}"))?.count())
}
