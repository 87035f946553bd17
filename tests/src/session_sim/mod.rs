//! Random schedules of sessions against faults, in virtual time, with what must always hold checked after every event.
//!
//! A schedule follows from its seed alone. One that goes wrong is run again without this client and that fault, until
//! nothing more can be left out, and printed so that it can be run again.

mod check;
mod dice;
mod plan;
mod turns;
mod world;

use plan::{Faults, LAST_ARRIVAL_MS, Plan};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use world::{Event, SWEEP_MS, Stage, TOTAL_MS, World};

/// What of a schedule is left out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Without {
    /// Clients, by number.
    pub clients: BTreeSet<usize>,
    /// Faults, by name.
    pub faults: BTreeSet<String>,
}

/// A schedule in which something did not hold.
#[derive(Debug, Clone)]
pub struct Violation {
    /// Its seed.
    pub seed: u64,
    /// What is not needed for it.
    pub without: Without,
    /// When, ms of virtual time.
    pub at_ms: u64,
    /// What did not hold.
    pub what: String,
}

/// What was run.
#[derive(Debug, Default)]
pub struct Summary {
    /// First seed and number of them.
    pub seeds: (u64, u64),
    /// Clients, each with a session.
    pub clients: u64,
    /// Turns.
    pub turns: u64,
    /// Events.
    pub events: u64,
    /// Invariants checked.
    pub checks: u64,
    /// How often what happened.
    pub seen: BTreeMap<&'static str, u64>,
    /// What did not hold.
    pub violations: Vec<Violation>,
}

/// The rate of one fault.
type Rate = fn(&mut Faults) -> &mut u64;

const FAULTS: [(&str, Rate); 11] = [
    ("leave", |f| &mut f.leave),
    ("kill", |f| &mut f.kill),
    ("remove", |f| &mut f.remove),
    ("refuse_open", |f| &mut f.refuse_open),
    ("slow_open", |f| &mut f.slow_open),
    ("lose_abort", |f| &mut f.lose_abort),
    ("fail_close", |f| &mut f.fail_close),
    ("refuse_close", |f| &mut f.refuse_close),
    ("slow", |f| &mut f.slow),
    ("refuse_turn", |f| &mut f.refuse_turn),
    ("cut", |f| &mut f.cut),
];

/// Runs the schedules of these seeds.
pub fn run(first: u64, count: u64) -> Summary {
    let mut summary = Summary { seeds: (first, count), ..Summary::default() };
    for seed in first..first.saturating_add(count) {
        let (violation, world, events) = schedule(seed, &Without::default(), false);
        summary.add(Summary {
            seeds: (seed, 1),
            clients: world.plan.clients.len() as u64,
            turns: world.turns.len() as u64,
            events,
            checks: world.truth.checks,
            seen: world.truth.seen_often,
            violations: violation.map(shrink).into_iter().collect(),
        });
    }
    summary
}

/// Runs one schedule, without what is left out. `trace` prints its events.
pub fn replay(seed: u64, without: &Without, trace: bool) -> Option<Violation> {
    schedule(seed, without, trace).0
}

fn schedule(seed: u64, without: &Without, trace: bool) -> (Option<Violation>, World, u64) {
    let mut plan = Plan::new(seed);
    for (name, fault) in FAULTS {
        if without.faults.contains(name) {
            *fault(&mut plan.faults) = 0;
        }
    }
    let mut world = World::new(plan, &without.clients);
    world.trace = trace;
    let mut events = 0;
    let happened = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| lead(&mut world, &mut events)));
    if let Err(panic) = happened {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        world.truth.wrong(text.unwrap_or("a panic"));
    }
    let violation = world.truth.wrong.first().map(|what| Violation {
        seed,
        without: without.clone(),
        at_ms: world.now,
        what: what.clone(),
    });
    (violation, world, events)
}

/// Leads a schedule to its end, or to the first thing that does not hold.
fn lead(world: &mut World, events: &mut u64) {
    // As long as clients are there.
    let done = |world: &World| world.turns.iter().all(|turn| turn.stage == Stage::Done);
    until(world, events, LAST_ARRIVAL_MS + TOTAL_MS + 1_000, |world| world.now > LAST_ARRIVAL_MS && done(world));
    // Nothing goes wrong any more. Every other gateway ends, the others' sessions expire.
    world.calm = true;
    if world.plan.seed.is_multiple_of(2) {
        let closes = world.table.close_all();
        world.send(closes);
    }
    // The longest idle timeout, an abort that nobody heard, and the longest pause before a close is sent again.
    // Closes that find no room are sent again sweep by sweep, as many at a time as the queue of this schedule takes.
    let sweeps = world.table.counts().engine_sessions.div_ceil(world.plan.side_queue.max(1));
    // One that takes longer than the time between two sweeps keeps its place for both.
    let calm = world.now + 8_000 + 6_000 + 31_000 + 6_000 + 2 * sweeps as u64 * SWEEP_MS;
    until(world, events, calm, |_| false);
    if world.truth.wrong.is_empty() {
        world.check_end();
    }
    let timeouts = world.now + 8_000 + TOTAL_MS + 5_000 + 40_000;
    until(world, events, timeouts, |_| false);
    if world.truth.wrong.is_empty() {
        world.check_very_end();
    }
}

fn until(world: &mut World, events: &mut u64, end_ms: u64, done: impl Fn(&World) -> bool) {
    let mut looked = world.now;
    while world.truth.wrong.is_empty() && world.now < end_ms {
        let Some(event) = world.next() else { return };
        let quiet = matches!(event, Event::Sweep | Event::Probe);
        world.happen(event);
        *events += 1;
        if !quiet || events.is_multiple_of(16) {
            world.check(*events);
        }
        // Looking at all turns is dear, so it is done now and then.
        if world.now > looked + 200 {
            looked = world.now;
            if done(world) {
                return;
            }
        }
    }
}

/// Leaves out what the violation does not need.
fn shrink(mut violation: Violation) -> Violation {
    let plan = Plan::new(violation.seed);
    let mut smaller = |without: Without| {
        let again = replay(violation.seed, &without, false);
        let same = again.filter(|again| kind(&again.what) == kind(&violation.what));
        let found = same.is_some();
        if let Some(same) = same {
            violation = same;
        }
        found
    };
    let mut without = Without::default();
    for (name, _) in FAULTS {
        let mut fewer = without.clone();
        fewer.faults.insert(name.to_owned());
        if smaller(fewer.clone()) {
            without = fewer;
        }
    }
    // By halves, then one by one.
    let mut size = plan.clients.len().div_ceil(2);
    while size > 0 {
        let kept: Vec<usize> = (0..plan.clients.len()).filter(|client| !without.clients.contains(client)).collect();
        for chunk in kept.chunks(size) {
            let mut fewer = without.clone();
            fewer.clients.extend(chunk);
            if fewer.clients.len() < plan.clients.len() && smaller(fewer.clone()) {
                without = fewer;
            }
        }
        size /= 2;
    }
    violation
}

/// The part of a text that does not depend on numbers.
fn kind(what: &str) -> &str {
    what.split(':').next().unwrap_or(what)
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, count) = self.seeds;
        writeln!(f, "seeds                 {first} to {} ({count} schedules)", first + count.saturating_sub(1))?;
        writeln!(f, "sessions              {}", self.clients)?;
        writeln!(f, "turns                 {}", self.turns)?;
        writeln!(f, "events                {}", self.events)?;
        writeln!(f, "invariants checked    {}", self.checks)?;
        for (what, often) in &self.seen {
            writeln!(f, "  {what:<36}{often}")?;
        }
        writeln!(f, "violations            {}", self.violations.len())?;
        for violation in &self.violations {
            writeln!(f, "  {violation}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, without, at_ms, what } = self;
        let all = Plan::new(*seed).clients.len();
        let kept: Vec<String> =
            (0..all).filter(|client| !without.clients.contains(client)).map(|client| client.to_string()).collect();
        let faults: Vec<&str> =
            FAULTS.iter().map(|(name, _)| *name).filter(|name| !without.faults.contains(*name)).collect();
        write!(
            f,
            "seed {seed} at {at_ms} ms: {what}\n    replay: turnstile-session-sim --seed {seed} --clients {} --faults {}",
            kept.join(","),
            if faults.is_empty() { "none".to_owned() } else { faults.join(",") }
        )
    }
}

impl Without {
    /// What is left out when only these clients and faults are kept.
    ///
    /// # Errors
    /// A client or fault that there is not.
    pub fn keeping(seed: u64, clients: Option<&str>, faults: Option<&str>) -> Result<Self, String> {
        let mut without = Self::default();
        if let Some(kept) = clients {
            let kept: BTreeSet<usize> = kept
                .split(',')
                .map(|client| client.trim().parse().map_err(|_| format!("--clients: {client:?} is no number")))
                .collect::<Result<_, _>>()?;
            let all = Plan::new(seed).clients.len();
            if let Some(unknown) = kept.iter().find(|&&client| client >= all) {
                return Err(format!("--clients: seed {seed} has no client {unknown}"));
            }
            without.clients = (0..all).filter(|client| !kept.contains(client)).collect();
        }
        if let Some(kept) = faults {
            let kept: BTreeSet<&str> = kept.split(',').map(str::trim).filter(|name| *name != "none").collect();
            if let Some(unknown) = kept.iter().find(|name| !FAULTS.iter().any(|(known, _)| known == *name)) {
                return Err(format!("--faults: there is no {unknown:?}"));
            }
            without.faults =
                FAULTS.iter().map(|(name, _)| *name).filter(|name| !kept.contains(name)).map(str::to_owned).collect();
        }
        Ok(without)
    }
}

impl Summary {
    /// Adds what another one counted; the seeds stay.
    pub fn add(&mut self, other: Self) {
        self.clients += other.clients;
        self.turns += other.turns;
        self.events += other.events;
        self.checks += other.checks;
        for (what, often) in other.seen {
            *self.seen.entry(what).or_insert(0) += often;
        }
        self.violations.extend(other.violations);
    }
}
