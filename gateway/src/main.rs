//! The `turnstile` binary.

fn main() -> std::process::ExitCode {
    turnstile::cli::main()
}
