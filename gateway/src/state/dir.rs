//! `state.dir`: one gateway at a time, files that are there whole or not at all, files that cannot be read kept aside.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const LOCK: &str = "lock";
const SEED: &str = "seed";
/// Digits and a line end.
const SEED_BYTES: u64 = 17;

/// Why the directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Another process has it.
    #[error("state.dir: {path} is used by another gateway{holder}; give each its own")]
    Taken {
        /// The directory.
        path: String,
        /// ` (process N)`, if it is known.
        holder: String,
    },
    /// The file system refused.
    #[error("state.dir: {path}: {error}")]
    Io {
        /// The directory or file.
        path: String,
        /// Why.
        error: io::Error,
    },
}

/// The directory, locked for this process as long as this lives.
#[derive(Debug)]
pub struct StateDir {
    path: PathBuf,
    _lock: File,
}

/// A file's bytes, or why there are none.
#[derive(Debug)]
pub enum Content {
    /// All of it.
    Bytes(Vec<u8>),
    /// There is no such file.
    Absent,
    /// It is larger than it may be, or cannot be read.
    Unreadable(String),
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> StateError {
    let path = path.display().to_string();
    move |error| StateError::Io { path, error }
}

impl StateDir {
    /// Makes the directory if need be, and takes it.
    ///
    /// # Errors
    /// It is taken, or the file system refuses.
    pub fn open(path: &Path) -> Result<Self, StateError> {
        DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed(path))?;
        let at = path.join(LOCK);
        let mut lock = private().read(true).write(true).truncate(false).open(&at).map_err(failed(&at))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut pid = String::new();
                let _ = (&lock).take(20).read_to_string(&mut pid);
                let known = !pid.trim().is_empty() && pid.trim().bytes().all(|b| b.is_ascii_digit());
                let holder = if known { format!(" (process {})", pid.trim()) } else { String::new() };
                return Err(StateError::Taken { path: path.display().to_string(), holder });
            }
            Err(TryLockError::Error(error)) => return Err(failed(&at)(error)),
        }
        // Only to be told who has it.
        let _ = lock.set_len(0).and_then(|()| lock.rewind()).and_then(|()| writeln!(lock, "{}", std::process::id()));
        Ok(Self { path: path.to_path_buf(), _lock: lock })
    }

    /// A file of the directory.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The seed behind all keys and hashes, the same at every start, so that they mean the same after it.
    ///
    /// # Errors
    /// The file system refuses.
    pub fn seed(&self) -> Result<u64, StateError> {
        let unreadable = match self.read(SEED, SEED_BYTES) {
            Content::Bytes(bytes) => match std::str::from_utf8(&bytes).ok().and_then(|text| parse_seed(text.trim())) {
                Some(seed) => return Ok(seed),
                None => Some("it is not 16 hexadecimal digits".to_owned()),
            },
            Content::Absent => None,
            Content::Unreadable(reason) => Some(reason),
        };
        if let Some(reason) = unreadable {
            self.keep_aside(SEED, &format!("{reason}; with a new seed every key is a new one"));
        }
        let seed = u64::try_from(crate::request_id::random_u128() >> 64).unwrap_or_default();
        self.write(SEED, format!("{seed:016x}\n").as_bytes()).map_err(failed(&self.file(SEED)))?;
        Ok(seed)
    }

    /// Reads a file, unless it is larger than `most` bytes.
    pub fn read(&self, name: &str, most: u64) -> Content {
        let mut file = match File::open(self.file(name)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Content::Absent,
            Err(error) => return Content::Unreadable(error.to_string()),
        };
        let mut bytes = Vec::new();
        match (&mut file).take(most.saturating_add(1)).read_to_end(&mut bytes) {
            Ok(_) if bytes.len() as u64 > most => Content::Unreadable(format!("it is larger than {most} bytes")),
            Ok(_) => Content::Bytes(bytes),
            Err(error) => Content::Unreadable(error.to_string()),
        }
    }

    /// Writes a file whole: beside its place, to the disk, and then into its place.
    ///
    /// # Errors
    /// What the file system says. The file is as it was then.
    pub fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.replace(name, bytes).map(drop)
    }

    /// The same, and the file to append to.
    ///
    /// # Errors
    /// What the file system says. The file is as it was then.
    pub fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<File> {
        let beside = self.file(&format!("{name}.new"));
        let mut file = private().write(true).truncate(true).open(&beside)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&beside, self.file(name))?;
        // The name is on disk only when the directory is.
        File::open(&self.path)?.sync_all()?;
        Ok(file)
    }

    /// Puts a file that is of no use where it is in nobody's way and can still be looked at: one, in place of the one before.
    pub fn keep_aside(&self, name: &str, reason: &str) {
        let kept = self.file(&format!("{name}.bad"));
        match std::fs::rename(self.file(name), &kept) {
            Ok(()) => {
                tracing::warn!(file = %self.file(name).display(), reason, kept = %kept.display(), "state not used")
            }
            Err(error) => {
                tracing::warn!(file = %self.file(name).display(), reason, %error, "state not used, nor kept aside");
            }
        }
    }
}

/// Files that only the gateway's user can read.
fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.create(true).mode(0o600);
    options
}

fn parse_seed(text: &str) -> Option<u64> {
    let digits = text.len() == 16 && text.bytes().all(|b| b.is_ascii_hexdigit());
    digits.then(|| u64::from_str_radix(text, 16).ok())?
}
