//! `turnstile replay`: recorded turns through the shipped fleet code and policies, before engine models, in virtual time.
//!
//! [`log`] reads what was recorded, [`workload`] makes turns of it and [`prompts`] the tokens that stand for their prompts;
//! [`world`] plays them under one [`policy`]; [`results`], [`compare`], [`report`] and [`plot`] tell what came of it. With the same
//! files, options and seed all of it is the same, byte for byte.

pub mod args;
pub mod blocks;
pub mod compare;
pub mod fleet;
mod fleet_file;
pub mod log;
pub mod plot;
pub mod policy;
pub mod prompts;
pub mod report;
pub mod results;
pub mod station;
pub mod tokens;
pub mod trace;
pub mod virtual_time;
pub mod workload;
pub mod world;

use crate::recording::line::TurnLine;
use args::{ReplayArgs, Warmup};
use compare::Difference;
use fleet::WorkerSpec;
use log::Log;
use plot::Series;
use policy::Wanted;
use report::{Report, Setting};
use results::{Summary, TurnResult};
use station::Station;
use std::collections::BTreeSet;
use std::path::Path;
use turnstile_config::Config;
use turnstile_plugins::{Runtime, RuntimeOptions};
use workload::{Timing, Workload};
use world::World;

/// How turns ended that a worker had taken on: those are played.
const ANSWERED: [&str; 5] = ["finished", "client_gone", "cut", "timeout", "plugin_end"];

/// What a replay came to, and how to show it.
pub struct Replayed {
    /// The report.
    pub report: Report,
    /// The plots.
    pub svg: String,
}

/// Runs the command and returns what it prints.
///
/// # Errors
/// What is wrong with the command line, a file, or a policy.
pub fn run(args: &ReplayArgs) -> Result<String, String> {
    let replayed = replay(args)?;
    let write = |option: &str, path: &Option<std::path::PathBuf>, text: &str| match path {
        Some(path) => std::fs::write(path, text).map_err(|e| format!("{option}: {}: {e}", path.display())),
        None => Ok(()),
    };
    write("--svg", &args.svg, &replayed.svg)?;
    write("--html", &args.html, &plot::html(&replayed.report, &replayed.svg))?;
    if args.json { replayed.report.json() } else { Ok(replayed.report.text()) }
}

/// Replays.
///
/// # Errors
/// As [`run`].
pub fn replay(args: &ReplayArgs) -> Result<Replayed, String> {
    let base = match &args.config {
        Some(path) => Config::load_without_pools(path).map_err(|e| format!("--config: {e}"))?,
        None => Config::default(),
    };
    let mut names = BTreeSet::new();
    let mut wanted = Vec::new();
    for name in &args.policies {
        if !names.insert(name) {
            return Err(format!("--policy: {name} is named twice"));
        }
        wanted.push(Wanted::read(name, &base)?);
    }
    let mut log = Log::read(&args.logs, args.format)?;
    log.retain("not answered by a worker", is_answered);
    let pool = choose_pool(&mut log, args.pool.as_deref())?;
    let specs = fleet::workers(&log, &pool, &args.fleet)?;
    let work = Workload::new(log, Timing { closed: args.closed_loop, speed: args.speed })?;
    work.check()?;
    let counts = counted(&work, args);
    let played = (0..work.turns()).filter(|number| counts(*number)).count();
    if played == 0 {
        return Err(format!("--warmup {}: no turn is left to count", args.warmup));
    }

    let runtime = runtime(&base)?;
    let mut all: Vec<(String, Vec<TurnResult>)> = Vec::new();
    let mut filters_not_run = Vec::new();
    for wanted in wanted {
        let (results, filters) = play(&wanted, &work, &specs, &runtime, args.seed)?;
        filters_not_run.extend(filters);
        all.push((wanted.name, results));
    }
    let policies = all.iter().map(|(name, results)| Summary::new(name, &work, results, specs.len(), &counts)).collect();
    let differences = match all.split_first() {
        Some(((against, first), others)) => others
            .iter()
            .map(|(name, results)| {
                let bootstrap = (args.resamples, args.seed);
                Difference::new((name, results), (against, first), &work, &counts, bootstrap)
            })
            .collect(),
        None => Vec::new(),
    };
    let setting = Setting {
        logs: args.logs.iter().map(|path| file_name(path)).collect(),
        pool,
        reading: work.notes.clone(),
        turns: work.turns() as u64,
        warmup_turns: (work.turns() - played) as u64,
        following_turns: work.following() as u64,
        stream_turns: work.prompts.deltas,
        speed: args.speed,
        seed: args.seed,
        resamples: args.resamples,
        fleet: args.fleet.fleet.as_deref().map(file_name),
        workers: specs,
        filters_not_run,
    };
    let report = Report { replay: setting, policies, differences };
    let series: Vec<Series<'_>> = all.iter().map(|(name, results)| Series { name, results }).collect();
    let svg = plot::svg(&report, &work, &series, &counts);
    Ok(Replayed { report, svg })
}

/// The directory of a file says nothing of it, and would make equal reports differ.
fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}

/// Whether a worker had taken the turn on.
fn is_answered(line: &TurnLine) -> bool {
    let reported = line.prompt_tokens.is_some() || line.ttft_ms.is_some();
    reported && (200..300).contains(&line.status) | (line.status == 499) && ANSWERED.contains(&line.end.as_str())
}

/// Keeps the turns of one pool.
fn choose_pool(log: &mut Log, asked: Option<&str>) -> Result<String, String> {
    let pools: BTreeSet<String> = log.entries.iter().map(|entry| entry.line.pool.clone()).collect();
    let pool = match (asked, pools.len()) {
        (Some(pool), _) if pools.contains(pool) => pool.to_owned(),
        (Some(pool), _) => return Err(format!("--pool: the log has no turn of {pool}, but of {}", list(&pools))),
        (None, 0 | 1) => pools.first().cloned().unwrap_or_default(),
        (None, _) => return Err(format!("--pool: the log has turns of several: {}", list(&pools))),
    };
    log.retain("of another pool", |line| line.pool == pool);
    Ok(pool)
}

fn list(names: &BTreeSet<String>) -> String {
    names.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
}

/// Which turns count.
fn counted(work: &Workload, args: &ReplayArgs) -> impl Fn(usize) -> bool + use<> {
    let first = match args.warmup {
        Warmup::Share(share) => (share * work.turns() as f64) as usize,
        Warmup::Seconds(seconds) => {
            let from_ms = seconds * 1e3 * args.speed;
            let early = |number: &usize| {
                work.entry(*number).is_some_and(|entry| ((entry.line.ts - work.first_ms) as f64) < from_ms)
            };
            (0..work.turns()).take_while(early).count()
        }
    };
    move |number| number >= first
}

fn runtime(config: &Config) -> Result<Runtime, String> {
    let cache_dir = crate::run::cache_dir(config);
    Runtime::new(RuntimeOptions { cache_dir, ..RuntimeOptions::default() }).map_err(|e| e.to_string())
}

/// Plays all turns under one policy. Returns them, and the filters that were not run.
fn play(
    wanted: &Wanted,
    work: &Workload,
    specs: &[WorkerSpec],
    runtime: &Runtime,
    seed: u64,
) -> Result<(Vec<TurnResult>, Vec<String>), String> {
    let longest = work.prompts.list.iter().map(|prompt| work.prompts.sequences.len(prompt.with_answer)).max();
    let longest = longest.unwrap_or_default();
    let policy = wanted.start(runtime, seed, work.first_ms)?;
    let limit = policy.config.admission.max_in_flight_per_worker;
    let stations = (0_u32..).zip(specs).map(|(index, spec)| Station::new(index, spec, limit, longest)).collect();
    let results = World::new(work, &policy, stations, seed)?.run()?;
    let filters = policy.filters.iter().map(|filter| format!("{filter} of {}", policy.name)).collect();
    Ok((results, filters))
}

#[cfg(test)]
#[path = "replay_tests.rs"]
mod tests;
