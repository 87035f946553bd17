//! Metrics that plugins define: one registry for the process, bounded, read by the gateway's exporter.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use hashbrown::HashMap;
use parking_lot::RwLock;

use crate::abi::MetricType;

/// Upper bounds of a histogram's buckets; one more bucket takes what is over the last.
pub const HISTOGRAM_BOUNDS: [u64; 16] =
    [1, 2, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 60_000, 600_000, 3_600_000];

/// Longest metric name, bytes.
pub const MAX_NAME: usize = 256;

/// The metrics of all plugins. Cheap to clone; clones are the same registry.
///
/// Values belong to the plugin's name, not to an instance: they add up over shards and survive reloads.
#[derive(Clone, Debug)]
pub struct PluginMetrics {
    inner: Arc<RwLock<Registry>>,
    per_plugin: usize,
}

#[derive(Debug, Default)]
struct Registry {
    by_name: HashMap<(Arc<str>, MetricType, Arc<str>), u32>,
    // Metric `id` is at `id - 1`; nothing where one was forgotten.
    metrics: Vec<Option<Arc<Metric>>>,
    free: Vec<u32>,
    defined: HashMap<Arc<str>, usize>,
}

#[derive(Debug)]
struct Metric {
    plugin: Arc<str>,
    name: Arc<str>,
    kind: MetricType,
    value: AtomicU64,
    buckets: Option<Box<[AtomicU64; HISTOGRAM_BOUNDS.len() + 1]>>,
}

/// Why a metric call was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MetricError {
    /// No metric of this plugin has this id.
    #[error("no such metric")]
    NotFound,
    /// The metric's kind does not allow this, or the name is empty or too long.
    #[error("not allowed for this kind of metric")]
    BadArgument,
    /// The plugin has as many metrics as it may.
    #[error("too many metrics")]
    Full,
}

/// One metric as read by the exporter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetricSnapshot {
    /// The plugin's name.
    pub plugin: Arc<str>,
    /// The name the plugin gave, any bytes it liked read as UTF-8.
    pub name: Arc<str>,
    /// The value.
    pub value: MetricValue,
}

/// A metric's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricValue {
    /// Sum of increments.
    Counter(u64),
    /// Last value.
    Gauge(u64),
    /// Observed values.
    Histogram {
        /// Sum of all observed values.
        sum: u64,
        /// How many values fell at or under each of [`HISTOGRAM_BOUNDS`] and over the one before it; the last is the
        /// rest.
        buckets: [u64; HISTOGRAM_BOUNDS.len() + 1],
    },
}

// === impl PluginMetrics ===

impl Default for PluginMetrics {
    fn default() -> Self {
        Self::new(512)
    }
}

impl PluginMetrics {
    /// A registry that lets each plugin define at most so many metrics.
    pub fn new(per_plugin: usize) -> Self {
        Self { inner: Arc::default(), per_plugin }
    }

    /// The id of a plugin's metric, made if it is new. One name may stand for one metric of each kind. Never 0.
    ///
    /// # Errors
    /// [`MetricError::Full`], or [`MetricError::BadArgument`] for an empty or overlong name.
    pub fn define(&self, plugin: &Arc<str>, kind: MetricType, name: &str) -> Result<u32, MetricError> {
        if name.is_empty() || name.len() > MAX_NAME {
            return Err(MetricError::BadArgument);
        }
        let name: Arc<str> = name.into();
        let key = (Arc::clone(plugin), kind, Arc::clone(&name));
        let mut registry = self.inner.write();
        if let Some(id) = registry.by_name.get(&key) {
            return Ok(*id);
        }
        let defined = registry.defined.entry(Arc::clone(plugin)).or_default();
        if *defined >= self.per_plugin {
            return Err(MetricError::Full);
        }
        *defined += 1;
        let buckets = (kind == MetricType::Histogram).then(Box::default);
        let metric = Arc::new(Metric { plugin: Arc::clone(plugin), name, kind, value: AtomicU64::new(0), buckets });
        let id = match registry.free.pop() {
            Some(id) => id,
            None => {
                registry.metrics.push(None);
                u32::try_from(registry.metrics.len()).map_err(|_| MetricError::Full)?
            }
        };
        if let Some(place) = place(&mut registry.metrics, id) {
            *place = Some(metric);
        }
        registry.by_name.insert(key, id);
        Ok(id)
    }

    /// Forgets the metrics of plugins that are not wanted any more.
    pub fn retain(&self, mut wanted: impl FnMut(&str) -> bool) {
        let mut registry = self.inner.write();
        let registry = &mut *registry;
        registry.defined.retain(|plugin, _| wanted(plugin));
        registry.by_name.retain(|(plugin, ..), id| {
            let stays = registry.defined.contains_key(plugin);
            if !stays && let Some(place) = place(&mut registry.metrics, *id) {
                *place = None;
                registry.free.push(*id);
            }
            stays
        });
    }

    /// Adds to a counter (only upward) or a gauge (either way, stopping at 0).
    ///
    /// # Errors
    /// [`MetricError::NotFound`]; [`MetricError::BadArgument`] for a histogram, or for a counter when `by` is not
    /// positive.
    pub fn increment(&self, plugin: &str, id: u32, by: i64) -> Result<(), MetricError> {
        let metric = self.metric(plugin, id)?;
        match metric.kind {
            MetricType::Counter if by > 0 => {
                metric.value.fetch_add(by.unsigned_abs(), Relaxed);
            }
            MetricType::Gauge if by >= 0 => {
                metric.value.fetch_add(by.unsigned_abs(), Relaxed);
            }
            MetricType::Gauge => {
                let down = by.unsigned_abs();
                let _ = metric.value.fetch_update(Relaxed, Relaxed, |value| Some(value.saturating_sub(down)));
            }
            _ => return Err(MetricError::BadArgument),
        }
        Ok(())
    }

    /// Adds to a counter, sets a gauge, observes in a histogram.
    ///
    /// # Errors
    /// [`MetricError::NotFound`].
    pub fn record(&self, plugin: &str, id: u32, value: u64) -> Result<(), MetricError> {
        let metric = self.metric(plugin, id)?;
        match (metric.kind, &metric.buckets) {
            (MetricType::Gauge, _) => metric.value.store(value, Relaxed),
            (MetricType::Histogram, Some(buckets)) => {
                let at = HISTOGRAM_BOUNDS.iter().position(|bound| value <= *bound).unwrap_or(HISTOGRAM_BOUNDS.len());
                if let Some(bucket) = buckets.get(at) {
                    bucket.fetch_add(1, Relaxed);
                }
                metric.value.fetch_add(value, Relaxed);
            }
            _ => {
                metric.value.fetch_add(value, Relaxed);
            }
        }
        Ok(())
    }

    /// A counter's or gauge's value.
    ///
    /// # Errors
    /// [`MetricError::NotFound`]; [`MetricError::BadArgument`] for a histogram.
    pub fn get(&self, plugin: &str, id: u32) -> Result<u64, MetricError> {
        let metric = self.metric(plugin, id)?;
        if metric.kind == MetricType::Histogram {
            return Err(MetricError::BadArgument);
        }
        Ok(metric.value.load(Relaxed))
    }

    /// All metrics, in the order of their ids.
    pub fn snapshot(&self) -> Vec<MetricSnapshot> {
        self.inner.read().metrics.iter().flatten().map(|metric| metric.snapshot()).collect()
    }

    fn metric(&self, plugin: &str, id: u32) -> Result<Arc<Metric>, MetricError> {
        let registry = self.inner.read();
        let at = (id as usize).checked_sub(1).ok_or(MetricError::NotFound)?;
        match registry.metrics.get(at) {
            Some(Some(metric)) if &*metric.plugin == plugin => Ok(Arc::clone(metric)),
            _ => Err(MetricError::NotFound),
        }
    }
}

impl Metric {
    fn snapshot(&self) -> MetricSnapshot {
        let value = self.value.load(Relaxed);
        let value = match (self.kind, &self.buckets) {
            (MetricType::Counter, _) => MetricValue::Counter(value),
            (MetricType::Histogram, Some(buckets)) => {
                MetricValue::Histogram { sum: value, buckets: std::array::from_fn(|at| load(buckets.get(at))) }
            }
            _ => MetricValue::Gauge(value),
        };
        MetricSnapshot { plugin: Arc::clone(&self.plugin), name: Arc::clone(&self.name), value }
    }
}

fn place(metrics: &mut [Option<Arc<Metric>>], id: u32) -> Option<&mut Option<Arc<Metric>>> {
    metrics.get_mut((id as usize).checked_sub(1)?)
}

fn load(bucket: Option<&AtomicU64>) -> u64 {
    bucket.map_or(0, |bucket| bucket.load(Relaxed))
}

#[cfg(test)]
#[path = "metrics_tests.rs"]
mod tests;
