//! The languages, and how the policy of `turnstile plugin new` is changed in each.

/// A language that projects are made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Language {
    /// Rust.
    Rust,
    /// Go.
    Go,
    /// AssemblyScript.
    As,
    /// C.
    C,
}

/// What the policy's reasons begin with.
pub const REASON: &str = "least loaded of ";

/// Cases that the change of the policy alters, with what they expect of it then.
pub const ALTERED_CASES: [Edit; 4] = [
    edit("cases/more-than-three-fallbacks/expect.json", r#""w7""#, r#""w0""#),
    edit("cases/more-than-three-fallbacks/expect.json", r#""route.target": "w0""#, r#""route.target": "w7""#),
    edit("cases/nothing-cached-is-least-load/expect.json", r#""d""#, r#""a""#),
    edit("cases/nothing-cached-is-least-load/expect.json", r#""route.target": "a""#, r#""route.target": "d""#),
];

/// A change of a source file: `from`, which it has once, becomes `to`.
pub struct Edit {
    pub file: &'static str,
    pub from: &'static str,
    pub to: &'static str,
}

const fn edit(file: &'static str, from: &'static str, to: &'static str) -> Edit {
    Edit { file, from, to }
}

// === impl Language ===

impl Language {
    /// All of them, in the order of the guide.
    pub const ALL: [Self; 4] = [Self::Rust, Self::Go, Self::As, Self::C];

    /// As `--lang` takes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rust => "rust",
            Self::Go => "go",
            Self::As => "as",
            Self::C => "c",
        }
    }

    /// Among workers that are equal otherwise the last is taken instead of the first.
    pub fn change(self) -> Edit {
        match self {
            Self::Rust => edit("src/choose.rs", "worker.index));", "Reverse(worker.index)));"),
            Self::Go => edit("main.go", "cmp.Compare(a.index, b.index)", "cmp.Compare(b.index, a.index)"),
            Self::As => {
                edit("assembly/index.ts", "return a.index < b.index ? -1 : 1;", "return a.index > b.index ? -1 : 1;")
            }
            Self::C => edit("my-policy.c", "return a->index < b->index;", "return a->index > b->index;"),
        }
    }
}
