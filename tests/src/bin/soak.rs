//! `turnstile-soak`: agents of all kinds on the gateway for a long time, while its workers fail by schedule and its
//! configuration changes; and at the end everything is back where it was, and every answer was right or explained.
//!
//! `SOAK_MINUTES` (20) is how long, `SOAK_SEED` (1) repeats a run's decisions, `SOAK_AGENTS` (16) how many talk at a time;
//! with `SOAK_EXAMPLES` set, one failure of each kind is shown.

#![forbid(unsafe_code)]

#[path = "../soak/agent.rs"]
mod agent;
#[path = "../soak/dice.rs"]
mod dice;
#[path = "../soak/fleet.rs"]
mod fleet;
#[path = "../soak/protocol.rs"]
mod protocol;
#[path = "../soak/samples.rs"]
mod samples;
#[path = "../soak/stage.rs"]
mod stage;
#[path = "../soak/trouble.rs"]
mod trouble;
#[path = "../soak/turn.rs"]
mod turn;
#[path = "../soak/verdict.rs"]
mod verdict;

use agent::Agent;
use clap::Parser as _;
use dice::Dice;
use samples::Sample;
use stage::Stage;
use std::collections::HashMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{self, Receiver};
use tokio::task::JoinSet;
use turn::Ended;
use turnstile::cli::{Cli, Command};
use turnstile::commands;
use turnstile_tests::process::binary;
use verdict::{Account, Faults};

/// How often the configuration or a policy changes.
const RELOAD_EVERY: Duration = Duration::from_secs(2);
/// How long everything may take to come to rest.
const REST: Duration = Duration::from_secs(60);
/// Ended turns that wait to be looked at. They are looked at all the time.
const REPORTS: usize = 65_536;
/// The longest time in which every fault of the schedule happens once.
const PERIOD: Duration = Duration::from_secs(60);

struct Settings {
    time: Duration,
    seed: u64,
    agents: u64,
    examples: bool,
    program: PathBuf,
}

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
    })
}

fn soak() -> Result<(), String> {
    let settings = settings()?;
    let runtime = tokio::runtime::Runtime::new().map_err(|e| e.to_string())?;
    let mut run = runtime.block_on(Run::begin(settings))?;
    let soaked = runtime.block_on(run.soak());
    let gateway = runtime.block_on(run.stage.gateway.stop());
    soaked?;
    let (status, log) = gateway?;
    if status.success() { Ok(()) } else { Err(format!("the gateway ended with {status}:\n{}", log.join("\n"))) }
}

/// The agents of one stretch of time, and what they report.
struct Agents {
    stop: Arc<AtomicBool>,
    tasks: JoinSet<()>,
    reports: Receiver<Ended>,
}

struct Run {
    settings: Settings,
    stage: Stage,
    period: Duration,
    ended: Vec<Ended>,
    hits: HashMap<String, Vec<String>>,
    kills: Vec<trouble::Window>,
    peak: Sample,
}

impl Run {
    async fn begin(settings: Settings) -> Result<Self, String> {
        let period = (settings.time / 2).min(PERIOD);
        let stage = Stage::set(&settings.program, period, settings.seed).await?;
        println!(
            "Turnstile on {}, {} workers, {} agents, {:.1} min, every fault once in {:.0} s, seed {}",
            stage.gateway.address,
            stage::WORKERS,
            settings.agents,
            settings.time.as_secs_f64() / 60.0,
            period.as_secs_f64(),
            settings.seed
        );
        Ok(Self {
            settings,
            stage,
            period,
            ended: Vec::new(),
            hits: HashMap::new(),
            kills: Vec::new(),
            peak: Sample::default(),
        })
    }

    fn agents(&self, stretch: u64) -> Result<Agents, String> {
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, reports) = mpsc::channel(REPORTS);
        let mut tasks = JoinSet::new();
        for number in 0..self.settings.agents {
            let builder = reqwest::Client::builder().no_proxy();
            // Some speak HTTP/2 to the gateway.
            let builder = if number % 5 == 4 { builder.http2_prior_knowledge() } else { builder };
            let number = stretch * 1000 + number;
            let agent = Agent {
                number,
                dice: Dice::new(self.settings.seed, number),
                client: builder.build().map_err(|e| e.to_string())?,
                gateway: self.stage.gateway.address,
                stop: Arc::clone(&stop),
                ended: sender.clone(),
                sent: 0,
            };
            tasks.spawn(agent.run());
        }
        Ok(Agents { stop, tasks, reports })
    }

    /// Lets agents talk for so long, with the faults of the schedule and the reloads.
    async fn stretch(&mut self, stretch: u64, time: Duration) -> Result<(), String> {
        let mut agents = self.agents(stretch)?;
        let began = Instant::now();
        let mut kill_at = began + self.period.mul_f64(trouble::KILLED.1);
        let (mut revive_at, mut killed_at) = (None, began);
        let mut reload_at = began + RELOAD_EVERY;
        while began.elapsed() < time {
            tokio::time::sleep(Duration::from_millis(200)).await;
            let now = Instant::now();
            if now >= reload_at {
                self.stage.reload();
                reload_at += RELOAD_EVERY;
            }
            let (victim, _) = trouble::KILLED;
            if let Some(worker) = self.stage.workers.get_mut(victim) {
                if revive_at.is_none() && now >= kill_at {
                    // What it has to tell is lost with it.
                    worker.read_hits(&self.stage.client, &mut self.hits).await;
                    killed_at = Instant::now();
                    worker.kill().await?;
                    revive_at = Some(now + self.period.mul_f64(trouble::AWAY));
                    kill_at += self.period;
                }
                if revive_at.is_some_and(|at| now >= at) {
                    worker.begin().await?;
                    self.kills.push(trouble::killed(victim, killed_at, Instant::now()));
                    revive_at = None;
                }
            }
            self.look(&mut agents.reports).await?;
        }
        agents.stop.store(true, Ordering::Relaxed);
        while let Some(ended) = agents.tasks.join_next().await {
            ended.map_err(|e| format!("an agent: {e}"))?;
        }
        if let (Some(_), Some(worker)) = (revive_at, self.stage.workers.get_mut(trouble::KILLED.0)) {
            worker.begin().await?;
            self.kills.push(trouble::killed(trouble::KILLED.0, killed_at, Instant::now()));
        }
        self.look(&mut agents.reports).await
    }

    /// Gathers what has happened.
    async fn look(&mut self, reports: &mut Receiver<Ended>) -> Result<(), String> {
        while let Ok(ended) = reports.try_recv() {
            self.ended.push(ended);
        }
        for worker in &mut self.stage.workers {
            worker.read_hits(&self.stage.client, &mut self.hits).await;
        }
        let sample = self.stage.sample().await?;
        self.peak.at_most(&sample);
        Ok(())
    }

    async fn soak(&mut self) -> Result<(), String> {
        let warm = (self.settings.time / 6).min(Duration::from_secs(60));
        let wait = async {
            while !self.stage.all_ready().await {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(REST, wait).await.map_err(|_| "the workers did not become ready")?;
        self.stretch(0, warm).await?;
        let start = self.stage.settle(REST).await?;
        self.stretch(1, self.settings.time - warm).await?;
        for worker in &mut self.stage.workers {
            if !worker.runs() {
                return Err(format!("worker {} has ended by itself", worker.place));
            }
            // It may be on its way back from a restart.
            let deadline = Instant::now() + REST;
            while !worker.clear(&self.stage.client).await {
                if Instant::now() > deadline {
                    return Err(format!("worker {} cannot be reached", worker.place));
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        let end = self.stage.settle(REST).await;
        let end = match end {
            Ok(end) => end,
            Err(left) => {
                println!("not at rest: {left}");
                self.stage.sample().await?
            }
        };
        let mut windows = self.kills.clone();
        for worker in &self.stage.workers {
            windows.extend(worker.windows()?);
        }
        let faults = Faults { hits: std::mem::take(&mut self.hits), windows, workers: self.stage.ids() };
        let account = verdict::judge(&self.ended, &faults, &self.stage.log)?;
        self.report(&account, &faults, &start, &end)
    }

    fn report(&self, account: &Account, faults: &Faults, start: &Sample, end: &Sample) -> Result<(), String> {
        let (table, grown) = samples::table(start, &self.peak, end);
        println!("\n{table}");
        println!(
            "{} turns: {} right, {} left by their client, {} failed and explained, {} unexplained; {} reloads, {} kills, \
             {} times a worker away, {} requests hit by a fault",
            account.turns(),
            account.right,
            account.left,
            account.explained.values().map(|(count, _)| count).sum::<u64>(),
            account.unexplained.len(),
            self.stage.reloads(),
            self.kills.len(),
            faults.windows.len(),
            faults.hits.len()
        );
        for ((what, why), (count, example)) in &account.explained {
            println!("  {count:>6} × {what}, explained by {why}");
            if self.settings.examples {
                println!("         such as {example}");
            }
        }
        for failure in account.unexplained.iter().take(20) {
            println!("unexplained: {failure}");
        }
        if account.right == 0 {
            return Err("no turn had an answer".into());
        }
        match (account.unexplained.len(), grown.is_empty()) {
            (0, true) => {
                println!("Every answer was right or explained, and everything is back where it was.");
                Ok(())
            }
            (unexplained, _) => Err(format!("{unexplained} unexplained; grown: {grown:?}")),
        }
    }
}
