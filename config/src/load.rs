//! From a text, a file or a list of URLs to a configuration.

use std::{fs::File, io::Read, path::Path};

use crate::{
    Config, check,
    conform::conform,
    node::{self, Data, Entry, Node},
    problem::{Errors, Place, Places, Problem},
};

/// A larger file is no configuration, and must not be read into memory.
const MAX_FILE_BYTES: u64 = 16 * 1024 * 1024;

/// What stands for the file's name when there is none.
const COMMAND_LINE: &str = "command line";

// === impl Config ===

impl Config {
    /// Reads and checks a configuration.
    ///
    /// `source_name` names the text in errors; relative paths in it start at `base_dir`. Files and environment variables
    /// that the text names are looked up.
    ///
    /// # Errors
    /// Everything that is wrong, in the order of the text. A text with syntax errors is checked no further.
    pub fn parse(text: &str, source_name: &str, base_dir: &Path) -> Result<Self, Errors> {
        finish(node::read(text, source_name)?, source_name, base_dir, true)
    }

    /// Reads and checks the configuration in a file that need not name workers: for tools that bring their own.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn load_without_pools(path: impl AsRef<Path>) -> Result<Self, Errors> {
        let path = path.as_ref();
        let (text, source) = read(path)?;
        finish(node::read(&text, &source)?, &source, path.parent().unwrap_or(Path::new("")), false)
    }

    /// Reads and checks the configuration in a file. Relative paths in it start at its directory.
    ///
    /// # Errors
    /// As [`Config::parse`], and when the file cannot be read or is not UTF-8.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, Errors> {
        let path = path.as_ref();
        let (text, source) = read(path)?;
        Self::parse(&text, &source, path.parent().unwrap_or(Path::new("")))
    }

    /// A configuration of one pool with these workers that takes any model, and defaults for all else.
    ///
    /// # Errors
    /// Every URL that is wrong or there twice, as `worker[INDEX]`; and when there is none.
    pub fn from_workers<S: AsRef<str>>(urls: &[S]) -> Result<Self, Errors> {
        let worker = |(index, url): (usize, &S)| {
            Node::placeless(format!("worker[{index}]"), Data::String(url.as_ref().to_owned()))
        };
        let workers = Node::placeless("worker", Data::Array(urls.iter().enumerate().map(worker).collect()));
        let pool = Node::placeless("worker", table("workers", workers));
        let pools = Node::placeless("worker", Data::Array(vec![pool]));
        finish(Node::placeless("", table("pools", pools)), COMMAND_LINE, Path::new(""), true)
    }
}

fn table(name: &str, node: Node) -> Data {
    Data::Table(vec![Entry { name: name.to_owned(), name_place: Place::default(), node }])
}

/// The text of a file, and its name.
fn read(path: &Path) -> Result<(String, String), Errors> {
    let source = path.display().to_string();
    let unreadable = |message: String| Errors::one(&source, Problem::new(Place::default(), "", message));
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes))
        .map_err(|error| unreadable(format!("cannot be read: {error}")))?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(unreadable(format!("is larger than {MAX_FILE_BYTES} bytes")));
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        let before = String::from_utf8_lossy(error.as_bytes().get(..valid).unwrap_or_default());
        let place = Places::new(&before).at(valid);
        Errors::one(&source, Problem::new(place, "", "the file is not UTF-8 text"))
    })?;
    Ok((text, source))
}

fn finish(root: Node, source: &str, base_dir: &Path, needs_pools: bool) -> Result<Config, Errors> {
    let mut problems = Vec::new();
    if needs_pools && root.get("pools").is_none() {
        let message = "missing; at least one pool is needed: [[pools]] with workers = [\"http://HOST:PORT\"]";
        problems.push(Problem::new(root.place, "pools", message));
    }
    let root = conform(root, &mut problems).unwrap_or_else(|| Node::placeless("", Data::Table(Vec::new())));
    let tree = root.to_json();
    let mut config: Config = match serde_json::from_value(tree) {
        Ok(config) => config,
        Err(error) => {
            // The schema has let something pass that the types do not take.
            problems.push(Problem::new(Place::default(), "", error.to_string()));
            return Err(Errors::new(source, problems));
        }
    };
    check::complete(&mut config, base_dir);
    check::check(&config, &root, &mut problems);
    if problems.is_empty() { Ok(config) } else { Err(Errors::new(source, problems)) }
}

#[cfg(test)]
#[path = "load_tests.rs"]
mod tests;
