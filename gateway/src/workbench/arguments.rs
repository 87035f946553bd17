//! The command line of `turnstile plugin`.

use clap::{Args, Subcommand, ValueEnum};
use std::path::PathBuf;
use turnstile_config::Phase;

/// `turnstile plugin`.
#[derive(Debug, Clone, Args)]
pub struct PluginArgs {
    /// What to do
    #[command(subcommand)]
    pub action: PluginAction,
}

/// What `turnstile plugin` does.
#[derive(Debug, Clone, Subcommand)]
pub enum PluginAction {
    /// Tell what a module is, what it may do, and whether it starts
    Check(CheckModuleArgs),
    /// Compile a module ahead of its use
    Compile(CompileArgs),
    /// Let a policy decide on a turn and explain the decision, take an exchange through a filter, or run the cases of a folder
    Run(TryArgs),
    /// Measure what each callback of a policy or filter costs, in time and memory
    Bench(BenchArgs),
    /// Begin a policy: a project that builds and passes its test
    New(NewArgs),
}

/// `turnstile plugin check`.
#[derive(Debug, Clone, Args)]
pub struct CheckModuleArgs {
    /// The module (.wasm)
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// What the plugin is started with
    #[command(flatten)]
    pub given: GivenArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// What a plugin is started with, as its entry in a configuration would say.
#[derive(Debug, Clone, Default, Args)]
pub struct GivenArgs {
    /// The plugin's configuration: JSON, an object as its `config` table or a list
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The plugin's configuration: text that it is handed byte for byte, as a string in `config`
    #[arg(long, value_name = "FILE", conflicts_with = "config")]
    pub config_text: Option<PathBuf>,
    /// What it reads as `plugin_root_id`, as its key `root_id`. Without it, the file's name less its extension
    #[arg(long, value_name = "ID")]
    pub root_id: Option<String>,
    /// Let it start with imports that the gateway does not have, as its key of this name
    #[arg(long)]
    pub stub_unknown_imports: bool,
}

/// `turnstile plugin compile`.
#[derive(Debug, Clone, Args)]
pub struct CompileArgs {
    /// The module (.wasm)
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Write the native code here, and its checksum beside it, instead of into the compile cache
    #[arg(long, short, value_name = "FILE", conflicts_with = "gateway_config")]
    pub out: Option<PathBuf>,
    /// The gateway whose compile cache is meant: its configuration (TOML). Without it, one without `state.dir`
    #[arg(long, value_name = "FILE")]
    pub gateway_config: Option<PathBuf>,
}

/// `turnstile plugin run`.
#[derive(Debug, Clone, Args)]
pub struct TryArgs {
    /// The module (.wasm)
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// The request: JSON {path, headers, body}; for a filter also {method, trailers, response, calls}
    #[arg(long, value_name = "FILE", required_unless_present = "cases")]
    pub turn: Option<PathBuf>,
    /// The fleet: JSON {workers, session, …}; docs/policy-reference.md has the members. A filter needs none
    #[arg(long, value_name = "FILE")]
    pub fleet: Option<PathBuf>,
    /// What the plugin is started with
    #[command(flatten)]
    pub given: GivenArgs,
    /// Fail unless the report has these members (JSON)
    #[arg(long, value_name = "FILE")]
    pub expect: Option<PathBuf>,
    /// Run every folder in this one that has turn.json, fleet.json (for a policy) and expect.json (and config.json or config.txt
    /// if it needs one)
    #[arg(long, value_name = "DIR", conflicts_with_all = ["turn", "fleet", "config", "config_text", "expect", "json"])]
    pub cases: Option<PathBuf>,
    /// The phase that it runs in
    #[arg(long, value_enum, default_value = "route")]
    pub phase: TriedPhase,
    /// Print JSON: the same for the same plugin, turn and fleet. Times go to standard error
    #[arg(long)]
    pub json: bool,
}

/// `turnstile plugin bench`.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// The module (.wasm)
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// The request: JSON {path, headers, body}; for a filter also {method, trailers, response, calls}, as for `plugin run`.
    /// Without it, a sample
    #[arg(long, value_name = "FILE")]
    pub turn: Option<PathBuf>,
    /// The fleet: JSON {workers, session, events, …}; without it, a sample of 8 workers. A filter needs none
    #[arg(long, value_name = "FILE", requires = "turn")]
    pub fleet: Option<PathBuf>,
    /// What the plugin is started with
    #[command(flatten)]
    pub given: GivenArgs,
    /// The phase that it runs in
    #[arg(long, value_enum, default_value = "route")]
    pub phase: TriedPhase,
    /// Turns (for a filter: exchanges) that are measured, after 100 that are not
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub turns: u32,
    /// Print JSON: times in µs, memory in bytes
    #[arg(long)]
    pub json: bool,
}

/// `turnstile plugin new`.
#[derive(Debug, Clone, Args)]
pub struct NewArgs {
    /// Name of the policy and of its folder: lower-case words joined by "-"
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Language
    #[arg(long, value_enum)]
    pub lang: Language,
    /// Folder to make the project's folder in
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub dir: PathBuf,
}

/// The phases of plugins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TriedPhase {
    /// A policy, when the turn arrives
    Admit,
    /// A policy, when the turn is dispatched
    Route,
    /// A filter of requests and answers
    Filter,
}

/// The languages that projects are made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Language {
    /// Rust (rustup's target wasm32-unknown-unknown)
    Rust,
    /// Go 1.24 or newer
    Go,
    /// AssemblyScript (Node.js, npm)
    As,
    /// C (clang and wasm-ld)
    C,
}

impl From<TriedPhase> for Phase {
    fn from(phase: TriedPhase) -> Self {
        match phase {
            TriedPhase::Admit => Self::Admit,
            TriedPhase::Route => Self::Route,
            TriedPhase::Filter => Self::Filter,
        }
    }
}
