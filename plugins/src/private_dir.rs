//! A directory that only this process's user can look into or change.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A private directory, for files that are trusted because nobody else can write them.
#[derive(Debug)]
pub struct PrivateDir {
    dir: PathBuf,
    owner: u32,
    next_temporary: AtomicU64,
}

impl PrivateDir {
    /// Opens a directory, making it with mode 0700 if it is missing.
    ///
    /// # Errors
    /// Text that says why it cannot be trusted or used: others have access to it, it is another user's, it is no directory.
    pub fn open(dir: &Path) -> Result<Self, String> {
        let text = |error: io::Error| error.to_string();
        DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(text)?;
        let dir = fs::canonicalize(dir).map_err(text)?;
        let metadata = fs::symlink_metadata(&dir).map_err(text)?;
        if metadata.mode() & 0o077 != 0 {
            return Err(format!("others have access to it (mode {:o}, wanted 700)", metadata.mode() & 0o7777));
        }
        let mut private = Self { dir, owner: 0, next_temporary: AtomicU64::new(0) };
        // A file of ours tells who we are.
        let (path, file) = private.temporary().map_err(text)?;
        let ours = file.metadata().map_err(text);
        let _ = fs::remove_file(path);
        private.owner = ours?.uid();
        if metadata.uid() != private.owner {
            return Err("it belongs to another user".to_owned());
        }
        Ok(private)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Makes sure that a file in it is a regular file of this user, not a link, that nobody else can write.
    ///
    /// # Errors
    /// It is not, or is not there.
    pub fn check(&self, path: &Path) -> io::Result<()> {
        let metadata = fs::symlink_metadata(path)?;
        if !metadata.is_file() || metadata.uid() != self.owner || metadata.mode() & 0o022 != 0 {
            return Err(io::Error::other("not a private file of this user"));
        }
        Ok(())
    }

    /// Writes a file in it as a whole: written aside, then renamed into place.
    ///
    /// # Errors
    /// What went wrong; the file is as it was before.
    pub fn write(&self, path: &Path, content: &[u8]) -> io::Result<()> {
        let (temporary, mut file) = self.temporary()?;
        let written = file.write_all(content).and_then(|()| fs::rename(&temporary, path));
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written
    }

    /// The files with this extension beyond the newest `keep`, the oldest first.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn surplus(&self, extension: &str, keep: usize) -> io::Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            if path.extension().is_some_and(|found| found == extension) {
                files.push((fs::metadata(&path)?.modified()?, path));
            }
        }
        files.sort();
        let surplus = files.len().saturating_sub(keep);
        Ok(files.into_iter().take(surplus).map(|(_, path)| path).collect())
    }

    fn temporary(&self) -> io::Result<(PathBuf, File)> {
        let number = self.next_temporary.fetch_add(1, Relaxed);
        let path = self.dir.join(format!(".new-{}-{number}", std::process::id()));
        // A file of this name can only be a leftover of a process that died.
        let _ = fs::remove_file(&path);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        Ok((path, file))
    }
}
