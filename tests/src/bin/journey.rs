//! `turnstile-journey`: a policy from `turnstile plugin new` to production and back, in every language, see
//! `turnstile_tests::journey`. A line for each step; a step that fails makes the exit code 1.

#![forbid(unsafe_code)]

use clap::Parser;
use std::process::ExitCode;
use turnstile_tests::journey::{Language, run};

/// A policy from an empty folder to production and back, in every language
#[derive(Debug, Parser)]
#[command(name = "turnstile-journey")]
struct Args {
    /// Languages; all of them if none is named
    #[arg(value_enum)]
    languages: Vec<Language>,
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    let languages = if args.languages.is_empty() { Language::ALL.to_vec() } else { args.languages };
    match run(&languages).await {
        Ok(failed) if failed.is_empty() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(reason) => {
            eprintln!("failed: {reason}");
            ExitCode::FAILURE
        }
    }
}
