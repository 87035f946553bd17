//! `turnstile-soak`: agents of all kinds on the gateway for a long time, see `turnstile_tests::soak`.
//!
//! `SOAK_MINUTES` (20) is how long, `SOAK_SEED` (1) repeats a run's decisions, `SOAK_AGENTS` (16) how many talk at a time;
//! with `SOAK_EXAMPLES` set, one failure of each kind is shown.

#![forbid(unsafe_code)]

use clap::Parser as _;
use std::process::ExitCode;
use std::time::Duration;
use turnstile::cli::{Cli, Command};
use turnstile::commands;
use turnstile_tests::process::binary;
use turnstile_tests::soak::{Pace, Settings, Soaked, run};

fn main() -> ExitCode {
    let role = std::env::args().nth(1);
    let result = match role.as_deref() {
        // Its own workers and gateway, where the gateway's binary is not to be used.
        Some("run" | "sim") => match Cli::parse().command {
            Command::Run(args) => commands::run(args),
            Command::Sim(args) => commands::sim(args),
            _ => Err("no such role".into()),
        },
        Some(other) => Err(format!("unexpected argument {other:?}: SOAK_MINUTES, SOAK_SEED and SOAK_AGENTS are read")),
        None => soak(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("failed: {message}");
            ExitCode::FAILURE
        }
    }
}

fn number<T: std::str::FromStr>(name: &str, default: T) -> Result<T, String> {
    match std::env::var(name) {
        Err(_) => Ok(default),
        Ok(text) => text.parse().map_err(|_| format!("{name}: {text:?} is not a number")),
    }
}

fn settings() -> Result<Settings, String> {
    let minutes: f64 = number("SOAK_MINUTES", 20.0)?;
    if !(0.1..=100_000.0).contains(&minutes) {
        return Err(format!("SOAK_MINUTES: {minutes} is not between 0.1 and 100000"));
    }
    let own = std::env::var_os("SOAK_OWN_BINARY").is_some();
    let program = if own { std::env::current_exe().map_err(|e| e.to_string())? } else { binary()? };
    Ok(Settings {
        time: Duration::from_secs_f64(minutes * 60.0),
        seed: number("SOAK_SEED", 1)?,
        agents: number("SOAK_AGENTS", 16)?,
        examples: std::env::var_os("SOAK_EXAMPLES").is_some(),
        program,
        pace: Pace::LONG,
    })
}

fn soak() -> Result<(), String> {
    let settings = settings()?;
    let runtime = tokio::runtime::Runtime::new().map_err(|e| e.to_string())?;
    let Soaked { right, unexplained, left, memory } = runtime.block_on(run(settings))?;
    if right == 0 {
        return Err("no turn had an answer".into());
    }
    if !unexplained.is_empty() || !left.is_empty() || memory.is_some() {
        return Err(format!("{} unexplained; grown: {left:?} {}", unexplained.len(), memory.unwrap_or_default()));
    }
    println!("Every answer was right or explained, and everything is back where it was.");
    Ok(())
}
