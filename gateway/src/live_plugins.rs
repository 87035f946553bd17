//! What is in memory of plugins: of the generation that serves, and of those before it.

use crate::generation::Generation;
use crate::metrics::Metrics;
use serde_json::{Value, json};
use turnstile_plugins::{LivePlugin, Runtime};

/// Whether the generation runs this start of a plugin.
fn is_current(generation: &Generation, live: &LivePlugin) -> bool {
    generation.chain.iter().any(|c| c.plugin.start_number() == live.start)
}

/// Sets the gauges.
pub fn export(runtime: &Runtime, generation: &Generation, metrics: &Metrics) {
    metrics.plugin_instances.reset();
    metrics.plugin_memory.reset();
    let count = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
    for live in runtime.live() {
        let labels = [&*live.name, if is_current(generation, &live) { "current" } else { "old" }];
        metrics.plugin_instances.with_label_values(&labels).add(count(live.instances));
        metrics.plugin_memory.with_label_values(&labels).add(count(live.memory_bytes));
    }
}

/// Starts of plugins that the generation does not run, for the admin listener.
pub fn old(runtime: &Runtime, generation: &Generation) -> Value {
    let old = runtime.live().into_iter().filter(|live| !is_current(generation, live));
    let shown = |live: LivePlugin| {
        json!({
            "name": &*live.name,
            "start": live.start,
            "instances": live.instances,
            "memory_bytes": live.memory_bytes,
        })
    };
    old.map(shown).collect()
}
