//! The hosts that a request can go to, as `proxy_get_upstream_hosts` lists them: each worker of its pool, with its load as text
//! in Prometheus' format and under vLLM's names, which is what load balancers written for Higress read.

use crate::fleet_state::{Candidates, Fleet};
use crate::generation::{Generation, PoolRuntime};
use crate::workers::Worker;
use bytes::Bytes;
use serde_json::json;
use std::fmt::Write as _;
use std::sync::Arc;
use turnstile_fleet::body::scan;
use turnstile_fleet::worker::WorkerView;

/// Where the hosts of one exchange are looked up.
pub struct Hosts(Source);

enum Source {
    /// What serves.
    Live { fleet: Arc<Fleet>, generation: Arc<Generation> },
    /// A pool as it is when nothing runs, without a fleet.
    Idle { pool: Arc<str>, hosts: Vec<(String, String)> },
}

impl Hosts {
    /// The hosts of a fleet, for a request of a generation.
    pub fn new(fleet: Arc<Fleet>, generation: Arc<Generation>) -> Self {
        Self(Source::Live { fleet, generation })
    }

    /// A pool whose workers, with their addresses, are ready and idle, for a request for a model.
    pub fn idle(pool: Arc<str>, workers: &[(String, WorkerView)], model: Option<&str>) -> Self {
        let model = model.unwrap_or_default();
        let hosts = workers.iter().map(|(address, view)| (address.clone(), host(view, model))).collect();
        Self(Source::Idle { pool, hosts })
    }

    /// The workers of the pool that a request with this body goes to: address, and a JSON object. Without a body, or with
    /// one that names no model, those of the pool for requests without a model. Nothing if no pool takes it.
    pub fn list(&self, body: &Bytes) -> Vec<(String, String)> {
        let (fleet, generation) = match &self.0 {
            Source::Live { fleet, generation } => (fleet, generation),
            Source::Idle { hosts, .. } => return hosts.clone(),
        };
        let model = model_of(generation, body);
        let Some(pool) = pool_of(generation, model.as_deref()) else { return Vec::new() };
        let Candidates { workers, views, .. } = fleet.candidates(pool, &[]);
        let shown = model.unwrap_or_default();
        workers.iter().zip(&views).map(|(worker, view)| (address(worker), host(view, &shown))).collect()
    }

    /// The name of that pool.
    pub fn pool_name(&self, body: &Bytes) -> Option<&str> {
        match &self.0 {
            Source::Live { generation, .. } => {
                pool_of(generation, model_of(generation, body).as_deref()).map(|pool| &*pool.name)
            }
            Source::Idle { pool, .. } => Some(pool),
        }
    }
}

/// The model that a body names, where pools differ by it.
fn model_of(generation: &Generation, body: &Bytes) -> Option<String> {
    if generation.pools.len() < 2 {
        return None;
    }
    scan(body).ok().and_then(|members| members.string("model").map(|model| model.into_owned()))
}

fn pool_of<'a>(generation: &'a Generation, model: Option<&str>) -> Option<&'a PoolRuntime> {
    // One pool serves what it serves; which model is asked for is checked later.
    let only = || generation.pools.first().filter(|_| generation.pools.len() == 1);
    generation.pool_for(model).or_else(only)
}

/// `ip:port`, or the host's name while it is not resolved.
pub fn address(worker: &Worker) -> String {
    match worker.target() {
        Some(target) => target.peer._address.to_string(),
        None => worker.url.authority(),
    }
}

fn host(view: &WorkerView, model: &str) -> String {
    let health = if view.is_ready() { "Healthy" } else { "Unhealthy" };
    json!({ "health_status": health, "metrics": metrics(view, model) }).to_string()
}

/// What a worker's load is, as vLLM would say it. Workers do not tell which adapters they run, so none are listed.
fn metrics(view: &WorkerView, model: &str) -> String {
    let model = label(model);
    let waiting = view.waiting_now();
    let running = view.occupancy().saturating_sub(waiting);
    let mut text = String::new();
    for (name, value) in [
        ("num_requests_running", f64::from(running)),
        ("num_requests_waiting", f64::from(waiting)),
        ("gpu_cache_usage_perc", view.kv_usage()),
        ("kv_cache_usage_perc", view.kv_usage()),
    ] {
        // Writing to a `String` cannot fail.
        let _ = writeln!(text, "# TYPE vllm:{name} gauge\nvllm:{name}{{model_name=\"{model}\"}} {value}");
    }
    text.push_str("# TYPE vllm:lora_requests_info gauge\n");
    text.push_str("vllm:lora_requests_info{max_lora=\"0\",running_lora_adapters=\"\",waiting_lora_adapters=\"\"} 1\n");
    text
}

/// A label's value; what would end it or its line is escaped.
fn label(text: &str) -> String {
    let text: String = text.chars().take(128).collect();
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use turnstile_fleet::ids::WorkerId;
    use turnstile_fleet::worker::WorkerState;

    fn view() -> WorkerView {
        WorkerView {
            running: 3,
            waiting: 2,
            kv_used_tokens: 250,
            kv_capacity_tokens: 1000,
            ..WorkerView::new("a", WorkerId(0))
        }
    }

    #[test]
    fn load_is_told_in_vllms_names() {
        let text = metrics(&view(), "qwen");
        for line in [
            "vllm:num_requests_running{model_name=\"qwen\"} 3",
            "vllm:num_requests_waiting{model_name=\"qwen\"} 2",
            "vllm:gpu_cache_usage_perc{model_name=\"qwen\"} 0.25",
            "vllm:lora_requests_info{max_lora=\"0\",running_lora_adapters=\"\",waiting_lora_adapters=\"\"} 1",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
        // Each line is a comment or `name{labels} number`, whatever a client calls its model.
        for line in metrics(&view(), "a\"} 9\nb\\{").lines().filter(|line| !line.starts_with('#')) {
            assert!(line.starts_with("vllm:") && line.rsplit(' ').next().unwrap().parse::<f64>().is_ok(), "{line}");
        }
    }

    #[test]
    fn a_worker_that_takes_no_turns_is_unhealthy() {
        let health = |view: &WorkerView| -> String {
            let host: serde_json::Value = serde_json::from_str(&host(view, "")).unwrap();
            host["health_status"].as_str().unwrap().to_owned()
        };
        assert_eq!(health(&view()), "Healthy");
        assert_eq!(health(&WorkerView { state: WorkerState::Draining, ..view() }), "Unhealthy");
    }
}
