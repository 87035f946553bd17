//! `turnstile-session-sim`: random schedules of sessions in virtual time, see `turnstile_tests::session_sim`.
//!
//! ```text
//! turnstile-session-sim [--first SEED] [--seeds COUNT]
//! turnstile-session-sim --seed SEED [--clients N,N] [--faults NAME,NAME|none] [--trace yes|no]
//! ```

use std::process::ExitCode;
use turnstile_tests::session_sim::{Summary, Without, replay, run};

fn main() -> ExitCode {
    // What goes wrong is caught and told with its seed.
    std::panic::set_hook(Box::new(|_| {}));
    match work() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::from(2)
        }
    }
}

fn work() -> Result<bool, String> {
    let (mut first, mut seeds, mut one) = (0, 1_000, None);
    let (mut clients, mut faults, mut trace) = (None, None, false);
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{name} needs a value"))?;
        let number = || value.parse::<u64>().map_err(|_| format!("{name}: {value:?} is no number"));
        match name.as_str() {
            "--first" => first = number()?,
            "--seeds" => seeds = number()?,
            "--seed" => one = Some(number()?),
            "--clients" => clients = Some(value),
            "--faults" => faults = Some(value),
            "--trace" => trace = value == "yes",
            _ => return Err(format!("there is no {name}: --first, --seeds, --seed, --clients, --faults, --trace")),
        }
    }
    if let Some(seed) = one {
        let without = Without::keeping(seed, clients.as_deref(), faults.as_deref())?;
        let violation = replay(seed, &without, trace);
        match &violation {
            Some(violation) => println!("{violation}"),
            None => println!("seed {seed}: all holds"),
        }
        return Ok(violation.is_none());
    }
    let started = std::time::Instant::now();
    let summary = parallel(first, seeds);
    print!("{summary}");
    println!("took                  {:.0} s", started.elapsed().as_secs_f64());
    Ok(summary.violations.is_empty())
}

/// The seeds, shared among the cores in blocks.
fn parallel(first: u64, seeds: u64) -> Summary {
    const BLOCK: u64 = 50;
    let next = std::sync::atomic::AtomicU64::new(0);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut all = Summary { seeds: (first, seeds), ..Summary::default() };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..cores)
            .map(|_| {
                scope.spawn(|| {
                    let mut mine = Vec::new();
                    loop {
                        let at = next.fetch_add(BLOCK, std::sync::atomic::Ordering::Relaxed);
                        if at >= seeds {
                            return mine;
                        }
                        mine.push(run(first + at, BLOCK.min(seeds - at)));
                    }
                })
            })
            .collect();
        for summary in workers.into_iter().filter_map(|worker| worker.join().ok()).flatten() {
            all.add(summary);
        }
    });
    all.violations.sort_by_key(|violation| violation.seed);
    all
}
