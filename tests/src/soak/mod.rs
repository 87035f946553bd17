//! The soak: agents of all kinds on the gateway while its workers fail by schedule and its configuration changes; and at the end
//! everything is back where it was, and every answer was right or explained.

mod agent;
mod dice;
mod fleet;
mod protocol;
mod samples;
mod stage;
mod trouble;
mod turn;
mod verdict;

use agent::Agent;
use dice::Dice;
use samples::Sample;
use stage::Stage;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{self, Receiver};
use tokio::task::JoinSet;
use turn::Ended;
use verdict::{Account, Faults};

/// How often the configuration or a policy changes.
const RELOAD_EVERY: Duration = Duration::from_secs(2);
/// How long everything may take to come to rest.
const REST: Duration = Duration::from_secs(60);
/// Ended turns that wait to be looked at. They are looked at all the time.
const REPORTS: usize = 65_536;
/// The longest time in which every fault of the schedule happens once.
const PERIOD: Duration = Duration::from_secs(60);

/// What is run.
pub struct Settings {
    /// How long agents talk.
    pub time: Duration,
    /// Repeats a run's decisions.
    pub seed: u64,
    /// Agents that talk at a time.
    pub agents: u64,
    /// Shows one failure of each kind.
    pub examples: bool,
    /// Takes the gateway's arguments.
    pub program: PathBuf,
    /// How long the gateway waits for what does not come.
    pub pace: Pace,
}

/// How long the gateway waits for what does not come, and keeps what is not used.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// For a worker that hangs, seconds. A busy machine makes the others wait, too.
    pub first_byte_s: u64,
    /// For one that stalls, seconds.
    pub between_bytes_s: u64,
    /// Idle connections, ms.
    pub idle_ms: u64,
    /// Idle sessions, seconds.
    pub session_s: u64,
}

/// What came of it.
pub struct Soaked {
    /// Turns with the right answer.
    pub right: u64,
    /// Failed turns that no fault explains.
    pub unexplained: Vec<String>,
    /// Counts that are not back where they were: files, tasks, sessions, turns, side requests, what workers hold.
    pub left: Vec<String>,
    /// The same of the memory, which only says something after a long time.
    pub memory: Option<String>,
}

impl Pace {
    /// For a run of minutes.
    pub const LONG: Self = Self { first_byte_s: 20, between_bytes_s: 15, idle_ms: 2_000, session_s: 3 };
    /// For a run of seconds. On a busy machine answers may come too late for it, so a failed turn says little.
    pub const SHORT: Self = Self { first_byte_s: 2, between_bytes_s: 2, idle_ms: 300, session_s: 1 };
}

/// Runs it.
///
/// # Errors
/// Something did not start, or ended by itself.
pub async fn run(settings: Settings) -> Result<Soaked, String> {
    let mut run = Run::begin(settings).await?;
    let soaked = run.soak().await;
    let gateway = run.stage.gateway.stop().await;
    let soaked = soaked?;
    let (status, log) = gateway?;
    if status.success() { Ok(soaked) } else { Err(format!("the gateway ended with {status}:\n{}", log.join("\n"))) }
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
        let stage = Stage::set(&settings, period).await?;
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

    async fn soak(&mut self) -> Result<Soaked, String> {
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
        Ok(self.report(account, &faults, &start, &end))
    }

    fn report(&self, account: Account, faults: &Faults, start: &Sample, end: &Sample) -> Soaked {
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
        let (memory, left): (Vec<String>, Vec<String>) =
            grown.into_iter().partition(|row| row.starts_with(samples::MEMORY));
        Soaked { right: account.right, unexplained: account.unexplained, left, memory: memory.into_iter().next() }
    }
}
