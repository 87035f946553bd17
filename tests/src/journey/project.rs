//! The policy's project, and the commands of its author.

use super::language::{Edit, Language};
use crate::process::binary;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Command;

/// The longest that a command may take: a first build compiles the standard library on some machines.
const PATIENCE: Duration = Duration::from_secs(900);
/// Lines of a command's output that are shown when it fails.
const SHOWN_LINES: usize = 15;

/// The policy's name.
pub const NAME: &str = "my-policy";

/// A project that `turnstile plugin new` is to make.
pub struct Project {
    pub language: Language,
    /// The author's folder, in which the project's is made.
    above: PathBuf,
    /// The program.
    turnstile: PathBuf,
}

/// What a command printed.
pub struct Printed {
    pub good: bool,
    /// Standard output and standard error.
    pub text: String,
}

impl Project {
    /// To be made in a folder.
    ///
    /// # Errors
    /// `turnstile` was not built.
    pub fn new(language: Language, above: &Path) -> Result<Self, String> {
        Ok(Self { language, above: above.to_owned(), turnstile: binary()? })
    }

    /// The project's folder.
    pub fn folder(&self) -> PathBuf {
        self.above.join(NAME)
    }

    /// Runs a command line of the guide in the author's folder. It has to end well.
    ///
    /// # Errors
    /// It did not: what it printed.
    pub async fn run_above(&self, line: &str) -> Result<String, String> {
        self.good(line, &self.above).await
    }

    /// The same in the project's folder.
    ///
    /// # Errors
    /// As with [`Project::run_above`].
    pub async fn run(&self, line: &str) -> Result<String, String> {
        self.good(line, &self.folder()).await
    }

    async fn good(&self, line: &str, folder: &Path) -> Result<String, String> {
        let printed = self.print(line, folder).await?;
        if printed.good {
            return Ok(printed.text);
        }
        let lines: Vec<&str> = printed.text.lines().collect();
        let last = lines.get(lines.len().saturating_sub(SHOWN_LINES)..).unwrap_or_default();
        Err(format!("`{line}` failed:\n    {}", last.join("\n    ")))
    }

    /// Runs a command line and returns what came of it.
    ///
    /// # Errors
    /// It cannot be started, or does not end.
    pub async fn print(&self, line: &str, folder: &Path) -> Result<Printed, String> {
        let toolchain = Path::new(env!("CARGO_MANIFEST_DIR")).join("../policies/with-toolchain.sh");
        let own = self.turnstile.parent().unwrap_or(Path::new("/"));
        // Before any other of the name.
        let mut path = own.as_os_str().to_owned();
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        let output = Command::new(toolchain)
            .args([self.language.name(), "sh", "-c", line])
            .current_dir(folder)
            .env("PATH", path)
            .env("TURNSTILE", &self.turnstile)
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output();
        let output = tokio::time::timeout(PATIENCE, output)
            .await
            .map_err(|_| format!("`{line}` did not end within {PATIENCE:?}"))?
            .map_err(|e| format!("`{line}`: {e}"))?;
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        Ok(Printed { good: output.status.success(), text })
    }

    /// Makes a change of a file, in the one place where it has that text.
    ///
    /// # Errors
    /// The file is not what was expected.
    pub fn edit(&self, edit: &Edit) -> Result<(), String> {
        let path = self.folder().join(edit.file);
        let fail = |e: std::io::Error| format!("{}: {e}", path.display());
        let text = std::fs::read_to_string(&path).map_err(fail)?;
        match text.matches(edit.from).count() {
            1 => std::fs::write(&path, text.replace(edit.from, edit.to)).map_err(fail),
            places => Err(format!("{}: {:?} is there {places} times", edit.file, edit.from)),
        }
    }

    /// Writes a file of the project.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, file: &str, text: &str) -> Result<(), String> {
        let path = self.folder().join(file);
        std::fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))
    }
}
