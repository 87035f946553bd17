//! `turnstile plugin new`: a project that builds and passes its test at once.

mod files;

use super::arguments::{Language, NewArgs};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// The name that the files have, in its three spellings.
const TEMPLATE: (&str, &str, &str) = ("warm-balance", "warm_balance", "WarmBalance");

/// Longest name, bytes.
const MAX_NAME: usize = 64;

/// Names that a toolchain or the project's own dependencies have taken.
const TAKEN: [&str; 54] = [
    "abstract",
    "alloc",
    "as",
    "async",
    "await",
    "become",
    "box",
    "break",
    "build",
    "cases",
    "const",
    "continue",
    "core",
    "crate",
    "do",
    "dyn",
    "else",
    "enum",
    "extern",
    "false",
    "final",
    "fn",
    "for",
    "gen",
    "if",
    "impl",
    "in",
    "let",
    "log",
    "loop",
    "macro",
    "match",
    "mod",
    "move",
    "mut",
    "override",
    "priv",
    "proc-macro",
    "proxy-wasm",
    "pub",
    "ref",
    "return",
    "self",
    "serde",
    "serde-json",
    "static",
    "std",
    "struct",
    "super",
    "test",
    "trait",
    "true",
    "try",
    "turnstile-policy",
];

/// Makes a project. Returns what to do next.
///
/// # Errors
/// The name will not do, the folder is there already, or a file cannot be written.
pub fn create(args: &NewArgs) -> Result<String, String> {
    check(&args.name)?;
    let folder = args.dir.join(&args.name);
    let fail = |path: &Path, e: std::io::Error| format!("{}: {e}", path.display());
    // Fails if there is anything of this name, so that nothing is ever overwritten.
    fs::create_dir(&folder).map_err(|e| match e.kind() {
        std::io::ErrorKind::AlreadyExists => format!("{}: is there already; nothing was changed", folder.display()),
        _ => fail(&folder, e),
    })?;
    for (path, content) in project(&args.name, args.lang) {
        let path = folder.join(path);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(|e| fail(parent, e))?;
        }
        let mut file = OpenOptions::new().write(true).create_new(true).open(&path).map_err(|e| fail(&path, e))?;
        file.write_all(content.as_bytes()).map_err(|e| fail(&path, e))?;
    }
    let needs = match args.lang {
        Language::Rust => "Rust with a WebAssembly target (rustup target add wasm32-unknown-unknown)",
        Language::Go => "Go 1.24 or newer",
        Language::As => "Node.js with npm",
        Language::C => "clang and wasm-ld (Debian: clang and lld; CLANG=clang-19 names another)",
    };
    let name = folder.display();
    Ok(format!("made {name}; it needs {needs}\n\n    cd {name}\n    make test\n\nREADME.md tells the rest.\n"))
}

/// Lower-case words of letters and digits, joined by single dashes: good in all the languages, and in file names.
fn check(name: &str) -> Result<(), String> {
    let word = |word: &str| {
        word.starts_with(|c: char| c.is_ascii_lowercase())
            && word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit())
    };
    if name.len() > MAX_NAME || !name.split('-').all(word) {
        return Err(format!(
            "NAME: expected lower-case words joined by \"-\", each of letters and digits and beginning with a letter, {MAX_NAME} \
             bytes at most, such as {:?}; found {name:?}",
            TEMPLATE.0
        ));
    }
    if TAKEN.contains(&name) {
        return Err(format!("NAME: {name:?} already means something to a compiler; choose another"));
    }
    Ok(())
}

/// The files of a project, with their paths in it.
fn project(name: &str, language: Language) -> Vec<(PathBuf, String)> {
    let own = match language {
        Language::Rust => files::RUST,
        Language::Go => files::GO,
        Language::As => files::ASSEMBLY_SCRIPT,
        Language::C => files::C,
    };
    let snake = name.replace('-', "_");
    let pascal: String = name
        .split('-')
        .flat_map(|word| {
            let mut letters = word.chars();
            letters.next().map(|first| first.to_ascii_uppercase()).into_iter().chain(letters)
        })
        .collect();
    let rename = |text: &str| {
        let renamed = text.replace(TEMPLATE.0, name).replace(TEMPLATE.1, &snake);
        renamed.replace(TEMPLATE.2, &pascal)
    };
    let all = files::COMMON.iter().chain(own);
    all.map(|(path, content)| (PathBuf::from(rename(path)), rename(content))).collect()
}

#[cfg(test)]
#[path = "project_tests.rs"]
mod tests;
