//! The command line.

use crate::replay::args::ReplayArgs;
use crate::workbench::arguments::PluginArgs;
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

/// Edge gateway for fleets of SGLang workers that serve agents.
///
/// Turnstile is a reverse proxy in front of unmodified SGLang servers. It reads agent hints from requests, lets WASM
/// policies decide order, worker and session of every turn, and warms or releases engine state when a stream has ended.
#[derive(Debug, Parser)]
#[command(name = "turnstile", version, max_term_width = 100, arg_required_else_help = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Does what the command line of this process says.
pub fn main() -> ExitCode {
    match crate::commands::dispatch(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the gateway
    Run(RunArgs),
    /// Check a configuration file and print what would run
    Check(CheckArgs),
    /// Explain how a running gateway would place a request, without sending it
    Explain(ExplainArgs),
    /// List the workers of a running gateway, or drain one
    Workers(WorkersArgs),
    /// Put the generation before back into a running gateway
    Rollback(RollbackArgs),
    /// Write, check, try and measure policies and other plugins
    Plugin(PluginArgs),
    /// Start simulated SGLang workers
    Sim(SimArgs),
    /// Replay recorded turns under one or several policies on simulated workers, in virtual time
    Replay(Box<ReplayArgs>),
    /// Print the JSON schema of the configuration
    Schema,
    /// Print the table of metrics (Markdown)
    Metrics,
}

/// `turnstile run`.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// Configuration file (TOML); reloaded when it or a plugin's file changes, on SIGHUP and on POST /reload
    #[arg(long, short, value_name = "FILE", conflicts_with = "worker", required_unless_present = "worker")]
    pub config: Option<PathBuf>,
    /// Run without a file: one pool with these workers
    #[arg(long, short, value_name = "URL")]
    pub worker: Vec<String>,
    /// Listen here instead of where the configuration says (host:port; port 0 takes a free one)
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<String>,
    /// Admin listener instead of the configured one ("off" for none)
    #[arg(long, value_name = "ADDRESS")]
    pub admin: Option<String>,
    /// Answer `x-turnstile-explain: 1` requests with headers that tell the decision
    #[arg(long)]
    pub explain_headers: bool,
}

/// `turnstile check`.
#[derive(Debug, Clone, Args)]
pub struct CheckArgs {
    /// Configuration file (TOML)
    #[arg(long, short, value_name = "FILE")]
    pub config: PathBuf,
}

/// `turnstile explain`.
#[derive(Debug, Clone, Args)]
pub struct ExplainArgs {
    /// File with the request body (JSON); "-" reads standard input
    #[arg(value_name = "BODY")]
    pub body: PathBuf,
    /// The running gateway
    #[command(flatten)]
    pub admin: AdminArgs,
    /// Path the request would be sent to
    #[arg(long, value_name = "PATH", default_value = "/v1/chat/completions")]
    pub path: String,
    /// Request header, as NAME:VALUE; may be repeated
    #[arg(long = "header", short = 'H', value_name = "NAME:VALUE")]
    pub headers: Vec<String>,
}

/// How a running gateway is reached.
#[derive(Debug, Clone, Args)]
pub struct AdminArgs {
    /// Admin listener of the running gateway
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9180", global = true)]
    pub admin: String,
    /// Bearer token of the admin listener
    #[arg(long, value_name = "TOKEN", env = "TURNSTILE_ADMIN_TOKEN", hide_env_values = true, global = true)]
    pub token: Option<String>,
}

/// `turnstile workers`.
#[derive(Debug, Clone, Args)]
pub struct WorkersArgs {
    /// The running gateway
    #[command(flatten)]
    pub admin: AdminArgs,
    /// What to do with which; without it they are listed
    #[command(subcommand)]
    pub action: Option<WorkersAction>,
}

/// What `turnstile workers` does with one.
#[derive(Debug, Clone, Subcommand)]
pub enum WorkersAction {
    /// Send new turns and sessions elsewhere, and let what runs there finish
    Drain {
        /// Id of the worker
        id: String,
        /// Wait until it is empty, at most so many seconds; fails if it is not empty then
        #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
        wait: Option<u64>,
    },
    /// Take a worker into use again
    Undrain {
        /// Id of the worker
        id: String,
    },
}

/// `turnstile rollback`.
#[derive(Debug, Clone, Args)]
pub struct RollbackArgs {
    /// The running gateway
    #[command(flatten)]
    pub admin: AdminArgs,
    /// Do not load the modules again that the present generation brought, until they change or are reset
    #[arg(long)]
    pub refuse: bool,
}

/// `turnstile sim`.
#[derive(Debug, Clone, Args)]
pub struct SimArgs {
    /// Number of workers
    #[arg(long, short, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub workers: u16,
    /// Port of the first worker; the others follow
    #[arg(long, short, default_value_t = 30000)]
    pub port: u16,
    /// Address to bind
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Model name the workers report
    #[arg(long, default_value = "sim")]
    pub model: String,
    /// Tokens of the KV pool of one worker
    #[arg(long, default_value_t = 200_000)]
    pub kv_tokens: u64,
    /// Requests one worker runs at a time
    #[arg(long, default_value_t = 16)]
    pub max_running: u32,
    /// Prefill rate, tokens per second
    #[arg(long, default_value_t = 8000.0)]
    pub prefill_rate: f64,
    /// Time scale: 2 runs twice as fast
    #[arg(long, default_value_t = 1.0)]
    pub speed: f64,
    /// Behave as if started without --enable-session-radix-cache
    #[arg(long)]
    pub no_session_radix_cache: bool,
    /// Behave as if started with --enable-streaming-session
    #[arg(long)]
    pub streaming_session: bool,
    /// Behave as if started without --enable-priority-scheduling
    #[arg(long)]
    pub no_priority: bool,
    /// Behave as if started without --enable-cache-report
    #[arg(long)]
    pub no_cache_report: bool,
    /// API key the workers ask for
    #[arg(long)]
    pub api_key: Option<String>,
    /// Faults by schedule: a JSON list, or TOML with [[fault]] tables (see sim/README.md)
    #[arg(long, value_name = "FILE")]
    pub faults: Option<PathBuf>,
}
