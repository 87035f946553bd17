//! The `turnstile` binary.

use clap::Parser;
use std::process::ExitCode;
use turnstile::cli::{Cli, Command};
use turnstile::commands;

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(args) => commands::run(args),
        Command::Check(args) => commands::check(&args),
        Command::Explain(args) => commands::explain(&args),
        Command::Sim(args) => commands::sim(args),
        Command::Schema => commands::schema(),
        Command::Metrics => commands::metrics(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}
