//! `turnstile-conformance`: runs the Proxy-Wasm conformance kit. One line for each test and mode, then the counts.

use clap::Parser;
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use turnstile_tests::conformance::{Kit, Mode, Selection};

/// Runs the Proxy-Wasm conformance kit against the host library and against the gateway.
#[derive(Parser)]
struct Arguments {
    /// Only behaviours of these numbers, separated by commas.
    #[arg(long, value_delimiter = ',')]
    only: Vec<u16>,
    /// Only tests with this in their name.
    #[arg(long, default_value = "")]
    name: String,
    /// Only against this: `host` or `gateway`.
    #[arg(long, value_parser = mode)]
    mode: Option<Mode>,
    /// One JSON object a line instead of text.
    #[arg(long)]
    json: bool,
    /// The kit's directory.
    #[arg(long)]
    kit: Option<PathBuf>,
    /// Where built guests lie, if not with the kit.
    #[arg(long)]
    guests: Option<PathBuf>,
}

fn mode(name: &str) -> Result<Mode, String> {
    Mode::ALL.into_iter().find(|mode| mode.name() == name).ok_or_else(|| "expected `host` or `gateway`".into())
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let opened = match &arguments.kit {
        Some(dir) => Kit::open(dir, arguments.guests.clone()),
        None => Kit::own(),
    };
    let ran = opened.and_then(|kit| {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let runtime = runtime.map_err(|error| error.to_string())?;
        let selection = Selection {
            modes: arguments.mode.into_iter().collect(),
            numbers: arguments.only.iter().copied().collect(),
            name: arguments.name.clone(),
        };
        let tell = |outcome: &turnstile_tests::conformance::Outcome| match arguments.json {
            true => println!("{}", outcome.json()),
            false => println!("{}", outcome.line()),
        };
        Ok(runtime.block_on(kit.run(&selection, tell)))
    });
    match ran {
        Ok(summary) => {
            let counts = json!({"passed": summary.passed, "failed": summary.failed, "untested": summary.untested});
            match arguments.json {
                true => println!("{counts}"),
                false => {
                    println!("{} passed, {} failed, 0 ignored", summary.passed, summary.failed);
                    if !summary.untested.is_empty() {
                        println!("behaviours without a test: {:?}", summary.untested);
                    }
                }
            }
            if summary.is_good() && summary.passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("turnstile-conformance: {error}");
            ExitCode::FAILURE
        }
    }
}
