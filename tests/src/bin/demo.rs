//! `turnstile-demo`: three simulated workers, the gateway, and an agent's conversation through it, explained. Every line that
//! begins with `ok` was checked; a claim that does not hold makes the exit code 1.

#![forbid(unsafe_code)]

#[path = "../demo/account.rs"]
mod account;
#[path = "../demo/client.rs"]
mod client;
#[path = "../demo/stage.rs"]
mod stage;
#[path = "../demo/story.rs"]
mod story;

use account::Account;
use stage::Stage;
use std::io::Write as _;
use std::process::ExitCode;
use std::time::Instant;
use story::Story;

#[tokio::main]
async fn main() -> ExitCode {
    let mut account = Account::default();
    let played = play(&mut account).await;
    let (text, claims, broken) = account.close();
    // The reader may have closed its end: the exit code tells all the same.
    let _ = write!(std::io::stdout(), "{text}");
    let failed = broken.into_iter().chain(played.err()).collect::<Vec<_>>();
    if failed.is_empty() {
        let _ = writeln!(std::io::stdout(), "All {claims} claims were checked and hold.");
        return ExitCode::SUCCESS;
    }
    for reason in failed {
        eprintln!("failed: {reason}");
    }
    ExitCode::FAILURE
}

async fn play(account: &mut Account) -> Result<(), String> {
    let started = Instant::now();
    let stage = Stage::set().await?;
    account.line(format!(
        "Turnstile on {}, three simulated SGLang workers of {} rows each (sim-0 to sim-2); ready after {:.1} s.",
        stage.gateway.address,
        stage::ROWS,
        started.elapsed().as_secs_f64()
    ));
    account.line("Decisions are from the gateway's log, the rest is from what client and workers saw.");
    account.line("");
    let played = Story::new(&stage, account).play().await;
    let stopped = stage.strike().await;
    played.and(stopped)
}
