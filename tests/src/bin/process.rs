//! The gateway's command line, for tests that need it as a process of its own.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    turnstile::cli::main()
}
