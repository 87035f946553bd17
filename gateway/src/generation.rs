//! A generation: one loaded set of configuration and plugins. Everything a request reads of the configuration it reads
//! from the generation it began with; a reload makes a new one aside and swaps it in at once.

use crate::callouts::Callouts;
use crate::deliberation::Rules;
use crate::fleet_state::{Fleet, FleetPool, FleetSettings};
use crate::module_store::ModuleStore;
use crate::plugin_start::{Modules, Start};
use crate::policy::{ChainPlugin, EventSet};
use crate::probation::RefusedModules;
use crate::request_body::BodyLimits;
use crate::ticks::Ticks;
use crate::upstream::{ConnectionLimits, Tls, TlsFault};
use crate::workers::{Named, ProbeOptions, Worker, WorkerSettings};
use http::HeaderValue;
use prometheus::IntGauge;
use std::sync::Arc;
use std::time::Duration;
use turnstile_config::{Config, OnError, Phase, TlsOptions};
use turnstile_fleet::decision::DecideOptions;
use turnstile_fleet::identity::IdentityOptions;
use turnstile_fleet::ids::SessionKey;
use turnstile_fleet::prefix::PrefixOptions;
use turnstile_fleet::queue::QueueOptions;
use turnstile_fleet::session::SessionOptions;
use turnstile_fleet::steering::SteeringOptions;
use turnstile_fleet::turn::UnderstandOptions;
use turnstile_fleet::worker::{EjectionOptions, LimitOptions};
use turnstile_plugins::{PluginServices, Runtime, SharedState};
use xxhash_rust::xxh3::xxh3_128;

/// Rows of a worker that tells no `max_running_requests`.
const DEFAULT_ROWS: u32 = 256;
/// Blocks hashed of one prompt: 32 MiB of prompt in blocks of 512 bytes.
const MAX_BLOCKS: usize = 65_536;
/// A streaming session idle for less than this is not closed to make room for another.
const EVICT_AFTER_IDLE_MS: u64 = 30_000;
/// Candidates that the decision log lists.
const LOG_CANDIDATES: usize = 16;

/// One pool of a generation.
pub struct PoolRuntime {
    /// Its number, the same for the life of the process, as the queue knows it.
    pub index: u32,
    /// Its name.
    pub name: Arc<str>,
    /// Makes the keys of its sessions: the same session id in another pool is another session, on other workers.
    pub salt: u128,
    /// Models it names; empty takes any.
    pub models: Vec<String>,
    /// Its workers, in order of their index.
    pub workers: Vec<Arc<Worker>>,
}

/// One loaded set of configuration and plugins.
pub struct Generation {
    /// Its number, from 1.
    pub number: u64,
    /// The configuration.
    pub config: Arc<Config>,
    /// Pools.
    pub pools: Vec<PoolRuntime>,
    /// The whole chain.
    pub chain: Arc<[ChainPlugin]>,
    /// Whether any plugin runs in the phase `filter`.
    pub has_filters: bool,
    /// What its plugins are told of answers, all of them together.
    pub events: EventSet,
    /// The native built-in's options.
    pub decide: DecideOptions,
    /// How requests are understood.
    pub understand: UnderstandOptions,
    /// Seed of tenant and session keys.
    pub seed: u64,
    /// `sessions.max_timeout_s`, ms.
    pub max_ttl_ms: u64,
    /// Bounds of a request body.
    pub body: BodyLimits,
    /// Candidates listed in the decision log.
    pub log_candidates: usize,
    /// When it was loaded, Unix ms.
    pub loaded_at: u64,
    /// Counts it, as long as it lives.
    _alive: Alive,
}

/// One more in a gauge, until it is dropped.
struct Alive(IntGauge);

impl Alive {
    fn new(gauge: &IntGauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// What every generation of a process shares.
pub struct Foundation {
    /// Plugin engine.
    pub runtime: Runtime,
    /// What plugins share.
    pub shared: Arc<SharedState>,
    /// What plugins call.
    pub callouts: Arc<Callouts>,
    /// What the process offers to plugins in place of that: another clock, and nothing to call.
    pub services: Option<Arc<dyn PluginServices>>,
    /// Seed of tenant and session keys.
    pub seed: u64,
    /// Threads that serve requests.
    pub threads: usize,
    /// Modules that are not loaded again.
    pub refused: RefusedModules,
    /// Modules from URLs.
    pub modules: ModuleStore,
}

/// Why a generation could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// A secret could not be read.
    #[error("{key}: {reason}")]
    Secret {
        /// The key of the configuration.
        key: String,
        /// Why.
        reason: String,
    },
    /// A file for TLS could not be used.
    #[error("{key}: {reason}")]
    Tls {
        /// The key of the configuration.
        key: String,
        /// Why, the file included.
        reason: String,
    },
    /// A plugin's module could not be read.
    #[error("plugins.{name}: cannot read {path}: {reason}")]
    Module {
        /// The plugin.
        name: String,
        /// The file.
        path: String,
        /// Why.
        reason: String,
    },
    /// A plugin did not start.
    #[error("{error} (module {path})")]
    Plugin {
        /// `builtin:NAME` or the file.
        path: String,
        /// Why.
        error: turnstile_plugins::PluginError,
    },
    /// A plugin asks for events that it could not be told of.
    #[error(
        "plugins.{name}: events: the module {path} exports no proxy_on_foreign_function, by which it would be told; leave \
         events out, or build the module with it"
    )]
    Deaf {
        /// The plugin.
        name: String,
        /// `builtin:NAME`, the file or the URL.
        path: String,
    },
    /// A plugin's module is not the one that the configuration pins.
    #[error("plugins.{name}: {path} has the SHA-256 {found}, and sha256 says {wanted}")]
    Digest {
        /// The plugin.
        name: String,
        /// `builtin:NAME`, the file or the URL.
        path: String,
        /// What the configuration says.
        wanted: String,
        /// What it is.
        found: String,
    },
    /// A plugin does not get through its self-test.
    #[error("plugins.{name}: self_test {file}: {reason} (module {path})")]
    SelfTest {
        /// The plugin.
        name: String,
        /// The file of the request.
        file: String,
        /// `builtin:NAME`, the file or the URL.
        path: String,
        /// What happened.
        reason: String,
    },
    /// A plugin that was in a generation which was taken back.
    #[error(
        "plugins.{name}: this module {why} with this configuration and generation {generation} was taken back for \
         it; change {path} or its configuration, or reset the plugin (POST /plugins/{name}/reset on the admin listener)"
    )]
    Refused {
        /// The plugin.
        name: String,
        /// What speaks against it.
        why: &'static str,
        /// `builtin:NAME` or the file.
        path: String,
        /// The generation that was taken back.
        generation: u64,
    },
}

/// Everything of a generation that can fail, made before anything is changed.
pub struct Prepared {
    config: Arc<Config>,
    chain: Vec<ChainPlugin>,
    workers: Vec<Vec<(String, WorkerSettings)>>,
    /// Where plugins may come from, which end with the last generation that has them.
    from: Vec<Arc<Generation>>,
}

/// Prepares a generation aside: secrets are read, modules compiled and started. Blocks for seconds where modules are not
/// cached. A plugin that is the same as in one of `running` (module, configuration, limits) is taken over as it runs.
///
/// # Errors
/// The first thing that failed; nothing was changed.
pub fn prepare(
    config: Config,
    foundation: &Foundation,
    running: &[Arc<Generation>],
    modules: &Modules,
) -> Result<Prepared, BuildError> {
    let workers = worker_settings(&config)?;
    if let Some(problem) = upstream_problems(&config).next() {
        return Err(problem);
    }
    let chain = Start { config: &config, foundation, running, modules }.chain()?;
    Ok(Prepared { config: Arc::new(config), chain, workers, from: running.to_vec() })
}

/// What would keep a generation from being built: every secret that cannot be read, every plugin that does not start.
pub fn problems(config: &Config, foundation: &Foundation) -> Vec<BuildError> {
    let mut problems: Vec<BuildError> =
        worker_settings(config).err().into_iter().chain(upstream_problems(config)).collect();
    let start = Start { config, foundation, running: &[], modules: &Modules::Current };
    let failed = config.plugins.iter().filter_map(|plugin| start.plugin(plugin).err());
    // Those of upstreams are named already.
    problems.extend(failed.filter(|problem| !matches!(problem, BuildError::Tls { .. })));
    problems
}

/// Upstreams whose files for TLS cannot be used, those that no plugin calls included.
fn upstream_problems(config: &Config) -> impl Iterator<Item = BuildError> {
    config.upstreams.iter().filter_map(|upstream| load_tls("upstreams", &upstream.name, upstream.tls_options()).err())
}

/// What the TLS options of a table say, with its files as they are now.
///
/// # Errors
/// The option that cannot be followed.
pub(crate) fn load_tls(table: &str, name: &str, options: TlsOptions<'_>) -> Result<Tls, BuildError> {
    Tls::load(options)
        .map_err(|TlsFault { key, reason }| BuildError::Tls { key: format!("{table}.{name}.{key}"), reason })
}

fn worker_settings(config: &Config) -> Result<Vec<Vec<(String, WorkerSettings)>>, BuildError> {
    let connection = ConnectionLimits {
        connect: Duration::from_millis(config.timeouts.connect_ms),
        idle: Duration::from_millis(config.timeouts.upstream_idle_ms),
    };
    let mut pools = Vec::with_capacity(config.pools.len());
    for pool in &config.pools {
        let name: Arc<str> = pool.name.as_str().into();
        let tls = Arc::new(load_tls("pools", &pool.name, pool.tls_options())?);
        let mut workers = Vec::with_capacity(pool.workers.len());
        for worker in &pool.workers {
            let authorization = match pool.api_key_for(worker) {
                None => None,
                Some(secret) => {
                    let key = format!("pools.{}.api_key", pool.name);
                    let fail = |reason: String| BuildError::Secret { key: key.clone(), reason };
                    let text = secret.resolve().map_err(|e| fail(e.to_string()))?;
                    let mut value = HeaderValue::try_from(format!("Bearer {text}"))
                        .map_err(|_| fail("is not text that can stand in a header".into()))?;
                    value.set_sensitive(true);
                    Some(value)
                }
            };
            let max_in_flight =
                worker.max_in_flight.or(pool.max_in_flight).or(config.admission.max_in_flight_per_worker);
            let settings = WorkerSettings {
                pool: Arc::clone(&name),
                labels: Arc::new(worker.labels.clone()),
                max_in_flight,
                authorization,
                h2c: pool.h2c,
                tls: Arc::clone(&tls),
                connection,
            };
            workers.push((worker.id.clone(), settings));
        }
        pools.push(workers);
    }
    Ok(pools)
}

impl Prepared {
    /// A generation once more: its configuration and its plugins as they run, with its secrets as they are now.
    ///
    /// # Errors
    /// A secret cannot be read.
    pub fn again(generation: &Arc<Generation>) -> Result<Self, BuildError> {
        let config = Arc::clone(&generation.config);
        let workers = worker_settings(&config)?;
        Ok(Self { config, chain: generation.chain.to_vec(), workers, from: vec![Arc::clone(generation)] })
    }

    /// Sees to it that plugins which were on their way out have instances, and keep them. Blocks for those that start again.
    ///
    /// # Errors
    /// A plugin whose time to drain is over does not start again.
    pub fn revive(&self, ticks: &Ticks) -> Result<(), BuildError> {
        // First, or the time of one could be over just after it was looked at.
        let spared = ticks.spare(self.chain.iter().map(|member| &member.plugin));
        let retired: Vec<_> = self.chain.iter().filter(|member| member.plugin.is_retired()).collect();
        let revived = retired.iter().try_for_each(|member| {
            let fail = |error| BuildError::Plugin { path: member.source.clone(), error };
            member.plugin.revive().map_err(fail)
        });
        revived.inspect_err(|_| {
            for member in retired {
                member.plugin.retire();
            }
            ticks.drain(spared);
        })
    }

    /// The generations that plugins were taken over from, to be held until the new one is known to the plugins' clock.
    pub fn taken_from(&self) -> Vec<Arc<Generation>> {
        self.from.clone()
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// True when a generation made of this would do what `other` does: same configuration, same modules, same keys.
    pub fn is_same_as(&self, other: &Generation) -> bool {
        let keys = |w: &WorkerSettings| (w.authorization.clone(), Arc::clone(&w.tls));
        *self.config == *other.config
            && self.chain.iter().map(|c| &c.digest).eq(other.chain.iter().map(|c| &c.digest))
            && self.chain.iter().map(|c| &c.destinations).eq(other.chain.iter().map(|c| &c.destinations))
            && self.workers.iter().zip(&other.pools).all(|(settings, pool)| {
                settings.iter().all(|(id, wanted)| {
                    pool.workers.iter().any(|w| *w.id == **id && keys(&w.settings()) == keys(wanted))
                })
            })
    }

    /// Puts the generation in place in the fleet: workers are adopted, probes of new ones started, bounds set. Cannot fail.
    pub fn commit(self, number: u64, foundation: &Foundation, fleet: &Arc<Fleet>) -> Generation {
        let config = self.config;
        let mut named = Vec::new();
        for (pool, settings) in config.pools.iter().zip(&self.workers) {
            for (worker, (id, settings)) in pool.workers.iter().zip(settings) {
                named.push(Named { id, url: &worker.url, settings: settings.clone() });
            }
        }
        let adopted = fleet.workers.adopt(named);
        let mut rest = adopted.named.into_iter();
        let mut pools = Vec::with_capacity(config.pools.len());
        for pool in &config.pools {
            let mut workers: Vec<_> = rest.by_ref().take(pool.workers.len()).collect();
            workers.sort_by_key(|w| w.index);
            pools.push(PoolRuntime {
                index: fleet.pool_id(&pool.name),
                name: pool.name.as_str().into(),
                salt: xxh3_128(pool.name.as_bytes()),
                models: pool.models.clone(),
                workers,
            });
        }
        // Counted before the fleet hears of it: as long as it is the only one, nobody needs the pools that it is without.
        let alive = Alive::new(&fleet.metrics.generations_alive);
        fleet.configure(fleet_settings(&config, &pools));
        for worker in adopted.added {
            fleet.watch(worker);
        }
        // Only now: a turn that saw the old workers going and the new ones not yet would have none to go to.
        for worker in &adopted.leaving {
            tracing::info!(worker = %worker.id, "worker removed");
            worker.remove();
            fleet.forget(worker);
        }
        // Turns that waited for one of them.
        fleet.admission.dispatch();
        let has_filters = self.chain.iter().any(|c| c.phase == Phase::Filter);
        let events = self.chain.iter().fold(EventSet::default(), |all, member| all.with(member.events));
        Generation {
            number,
            pools,
            chain: self.chain.into(),
            has_filters,
            events,
            decide: decide_options(&config),
            understand: understand_options(&config, foundation.seed),
            seed: foundation.seed,
            max_ttl_ms: config.sessions.max_timeout_s.saturating_mul(1000),
            body: BodyLimits {
                bytes: config.limits.body_bytes.as_usize(),
                all_bytes: config.limits.bodies_bytes.as_usize(),
                overload_status: config.admission.overload_status.code(),
                decoding: config.limits.body_decoding,
                pause: Duration::from_secs(config.timeouts.client_body_s),
                total: Duration::from_secs(config.timeouts.client_body_total_s),
            },
            log_candidates: LOG_CANDIDATES,
            loaded_at: crate::clock::unix_ms(),
            _alive: alive,
            config,
        }
    }
}

fn block_bytes(config: &Config) -> usize {
    usize::try_from(config.routing.block_bytes).unwrap_or(512)
}

/// How turns are understood.
pub fn understand_options(config: &Config, seed: u64) -> UnderstandOptions {
    UnderstandOptions {
        identity: IdentityOptions::from_config(&config.sessions, seed),
        prefix: PrefixOptions::new(block_bytes(config), MAX_BLOCKS, seed),
        steering: SteeringOptions::from_config(&config.steering),
    }
}

/// The native built-in's options.
pub fn decide_options(config: &Config) -> DecideOptions {
    DecideOptions {
        limits: limits(config),
        max_head_start_ms: i64::try_from(config.admission.max_head_start_s * 1000).unwrap_or(i64::MAX),
        ..DecideOptions::default()
    }
}

fn limits(config: &Config) -> LimitOptions {
    LimitOptions { kv_high_watermark: config.admission.kv_high_watermark, default_limit: DEFAULT_ROWS }
}

/// Bounds of the queue under a configuration.
pub fn queue_options(config: &Config) -> QueueOptions {
    QueueOptions {
        max_tickets: usize::try_from(config.admission.max_queue).unwrap_or(usize::MAX),
        max_bytes: config.admission.max_queue_bytes.bytes(),
        fairness: None,
    }
}

/// Bounds of the session table under a configuration.
pub fn session_options(config: &Config) -> SessionOptions {
    SessionOptions {
        max_sessions: usize::try_from(config.sessions.max_sessions).unwrap_or(usize::MAX),
        default_ttl_ms: config.sessions.default_timeout_s.saturating_mul(1000),
        max_turn_ms: config.timeouts.total_s.saturating_mul(1000),
        engine_timeout_margin_ms: config.sessions.engine_timeout_margin_s.saturating_mul(1000),
        evict_after_idle_ms: EVICT_AFTER_IDLE_MS,
    }
}

/// What a configuration says about the fleet.
pub fn fleet_settings(config: &Config, pools: &[PoolRuntime]) -> FleetSettings {
    let ms = Duration::from_millis;
    FleetSettings {
        pools: pools
            .iter()
            .map(|p| FleetPool { index: p.index, name: Arc::clone(&p.name), workers: p.workers.clone() })
            .collect(),
        gone: Vec::new(),
        limits: limits(config),
        probe: ProbeOptions {
            probe_every: ms(config.routing.probe_interval_ms),
            load_every: ms(config.routing.load_interval_ms),
            timeout: ms(config.routing.probe_timeout_ms),
            unhealthy_after: config.routing.unhealthy_after,
            healthy_after: config.routing.healthy_after,
            ejection: EjectionOptions {
                consecutive_faults: config.ejection.consecutive_faults,
                base_ms: config.ejection.base_ms,
                max_ms: config.ejection.max_ms,
                max_share: config.ejection.max_share,
                wedged_after_ms: config.ejection.wedged_after_ms,
            },
        },
        block_bytes: block_bytes(config),
        index_blocks: usize::try_from(config.routing.index_blocks_per_worker).unwrap_or(usize::MAX),
        bytes_per_token: config.routing.bytes_per_token,
        queue: queue_options(config),
        sessions: session_options(config),
        side_timeout: Duration::from_secs(config.timeouts.side_request_s),
        side_per_worker: config.limits.side_per_worker as usize,
    }
}

impl PoolRuntime {
    /// The key of a session in this pool.
    pub fn session_key(&self, key: SessionKey) -> SessionKey {
        SessionKey(key.0 ^ self.salt)
    }
}

impl Generation {
    /// What it says about decisions.
    pub fn rules(&self) -> Rules<'_> {
        Rules { decide: &self.decide, max_ttl_ms: self.max_ttl_ms }
    }

    /// The pool that serves a model: the one that names it, else the one that takes any.
    pub fn pool_for(&self, model: Option<&str>) -> Option<&PoolRuntime> {
        let named = model.and_then(|model| self.pools.iter().find(|p| p.models.iter().any(|m| m == model)));
        let any = || self.pools.iter().find(|p| p.models.is_empty());
        // Without a model the worker chooses, so a single pool is good enough even when it names its models.
        let only = || (model.is_none() && self.pools.len() == 1).then(|| self.pools.first()).flatten();
        named.or_else(any).or_else(only)
    }

    /// What a plugin's failure means in its phase, for the admin listener.
    pub fn on_error_of(&self, name: &str) -> Option<OnError> {
        self.chain.iter().find(|c| &*c.name == name).map(|c| c.on_error)
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        tracing::info!(generation = self.number, "generation ended: its last request is done");
    }
}
