//! `turnstile sim`: a fleet of simulated SGLang workers until a signal ends it.

use crate::cli::SimArgs;
use std::path::Path;
use tokio::signal::unix::{SignalKind, signal};
use turnstile_sim::{Scheduled, SimConfig, SimWorker, schedule};

/// Runs the fleet.
///
/// # Errors
/// A port that cannot be bound, or a schedule of faults that cannot be read.
pub fn run(args: SimArgs) -> Result<(), String> {
    let runtime = tokio::runtime::Runtime::new().map_err(|e| e.to_string())?;
    runtime.block_on(serve(args))
}

/// The schedule of a file.
fn read_faults(path: &Path, workers: usize) -> Result<Vec<Scheduled>, String> {
    let name = path.display();
    let text = std::fs::read_to_string(path).map_err(|e| format!("--faults: {name}: {e}"))?;
    let faults = schedule(&text).map_err(|e| format!("--faults: {name}: {e}"))?;
    for (place, fault) in faults.iter().enumerate() {
        if let Some(worker) = fault.worker.filter(|worker| *worker >= workers) {
            return Err(format!("--faults: {name}: fault {}: there is no worker {worker} of {workers}", place + 1));
        }
    }
    Ok(faults)
}

async fn serve(args: SimArgs) -> Result<(), String> {
    let faults = match &args.faults {
        Some(path) => read_faults(path, args.workers.into())?,
        None => Vec::new(),
    };
    let size = |n: u64| usize::try_from(n).map_err(|_| format!("{n} is too large"));
    let config = SimConfig {
        model: args.model,
        prefill_tokens_per_s: args.prefill_rate,
        max_running_requests: args.max_running as usize,
        max_total_tokens: size(args.kv_tokens)?,
        enable_session_radix_cache: !args.no_session_radix_cache,
        enable_streaming_session: args.streaming_session,
        enable_priority_scheduling: !args.no_priority,
        enable_cache_report: !args.no_cache_report,
        api_key: args.api_key,
        speed: args.speed,
        ..SimConfig::default()
    };
    let mut workers = Vec::new();
    for n in 0..args.workers {
        let port = if args.port == 0 { 0 } else { args.port.checked_add(n).ok_or("--port: the ports end at 65535")? };
        let address = (args.host.as_str(), port);
        let worker = SimWorker::start(address, config.clone())
            .await
            .map_err(|e| format!("cannot listen on {}:{port}: {e}", args.host))?;
        println!("{}", worker.url());
        workers.push(worker);
    }
    // The schedule begins when all are there.
    for (place, worker) in workers.iter().enumerate() {
        for scheduled in faults.iter().filter(|scheduled| scheduled.worker.is_none_or(|worker| worker == place)) {
            worker.faults().add(scheduled.fault.clone());
        }
    }
    let mut terminate = signal(SignalKind::terminate()).map_err(|e| e.to_string())?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(|e| e.to_string())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    for worker in workers {
        worker.shutdown().await;
    }
    Ok(())
}

#[cfg(test)]
#[path = "simulate_tests.rs"]
mod tests;
