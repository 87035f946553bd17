//! What a policy sees and writes: the facts under `turnstile.` and the decision, lent to its callbacks.

use crate::policy::bulk;
use crate::policy::facts::{self, EndFacts, TurnFacts};
use crate::policy::headers::PolicyHeaders;
use crate::policy::store::ShadowStore;
use std::borrow::Cow;
use std::sync::Arc;
use turnstile_fleet::decision::{Candidates, Decision, WriteError};
use turnstile_fleet::facts::WorkerFacts;
use turnstile_fleet::ids::WorkerId;
use turnstile_fleet::session::SessionView;
use turnstile_fleet::worker::{LimitOptions, WorkerView};
use turnstile_plugins::{HeaderPairs, MapType, SecretHeaders, Status, StreamEnv};
use xxhash_rust::xxh3::xxh3_64;

/// Events a policy may emit into one turn's decision log.
const MAX_EVENTS: usize = 16;
/// Bytes of one of them.
const MAX_EVENT_BYTES: usize = 4096;

/// What is known when a turn is placed: the workers of its pool at that moment.
#[derive(Debug, Clone, Default)]
pub struct RouteFacts {
    /// The workers, in order of their index.
    pub workers: Arc<[WorkerView]>,
    /// Tokens of the turn that each is believed to have cached.
    pub cached_tokens: Arc<[u64]>,
    /// Workers that failed this turn before.
    pub excluded: Arc<[WorkerId]>,
    /// The worker of the turn's session.
    pub bound: Option<WorkerId>,
    /// When a worker counts as full.
    pub limits: LimitOptions,
    /// Number of the attempt, 0 first.
    pub attempt: u32,
    /// What became of the attempt before.
    pub last_error: Option<String>,
}

impl RouteFacts {
    /// The candidates.
    pub fn candidates(&self) -> Candidates<'_> {
        Candidates::new(&self.workers, &self.cached_tokens)
    }
}

/// Shared key-value store of policies, across plugins and generations.
pub trait PolicyStore: Send + Sync {
    /// The value of a key, with its version.
    fn get(&self, key: &[u8]) -> Option<(Vec<u8>, u64)>;
    /// Writes if the version is the given one (0: whatever it is). False when it was another.
    fn compare_and_set(&self, key: &[u8], value: &[u8], version: u64) -> bool;
}

/// One turn's environment, for all its policies in turn.
pub struct PolicyEnv {
    turn: Arc<TurnFacts>,
    headers: PolicyHeaders,
    route: RouteFacts,
    session: Option<SessionView>,
    builtin: Option<Arc<Decision>>,
    end: Option<EndFacts>,
    store: Arc<dyn PolicyStore>,
    table: Option<Vec<u8>>,
    /// What was written.
    pub decision: Decision,
    /// Writes that were dropped: name, cause.
    pub dropped: Vec<(String, WriteError)>,
    /// Events for the decision log.
    pub events: Vec<String>,
    /// What the policy at work may not see.
    pub hidden: SecretHeaders,
    /// What was written about, by a shadow while one is asked.
    spoken: Spoken,
}

/// What was there before a shadow was asked.
pub struct Shadowed {
    store: Arc<dyn PolicyStore>,
    decision: Decision,
    events: usize,
}

/// What a policy has written about, be it what stood there before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spoken([bool; Decision::NAMES.len()]);

impl Spoken {
    fn note(&mut self, name: &str) {
        let name = name.strip_prefix("turnstile.").unwrap_or(name);
        for (spoken, known) in self.0.iter_mut().zip(Decision::NAMES) {
            *spoken |= name == known;
        }
    }

    /// The names of the decisions that it has written.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        Decision::NAMES.into_iter().zip(self.0).filter(|(_, spoken)| *spoken).map(|(name, _)| name)
    }

    /// Whether it has written anything about where the turn goes.
    pub fn of_workers(self) -> bool {
        self.names().any(|name| matches!(name, "route.target" | "route.exclude"))
    }

    /// Whether it has written anything about its place in the queue.
    pub fn of_order(self) -> bool {
        self.names().any(|name| name.starts_with("queue."))
    }

    /// Whether it has written anything about its session.
    pub fn of_session(self) -> bool {
        self.names().any(|name| name.starts_with("session."))
    }
}

impl PolicyEnv {
    /// An environment for a turn that has not been placed.
    pub fn new(turn: Arc<TurnFacts>, session: Option<SessionView>, store: Arc<dyn PolicyStore>) -> Self {
        Self {
            headers: PolicyHeaders(turn.head.clone()),
            turn,
            route: RouteFacts::default(),
            session,
            builtin: None,
            end: None,
            store,
            table: None,
            decision: Decision::default(),
            dropped: Vec::new(),
            events: Vec::new(),
            hidden: SecretHeaders::ALL,
            spoken: Spoken::default(),
        }
    }

    /// Sets what is known at placement.
    pub fn place(&mut self, route: RouteFacts, session: Option<SessionView>, builtin: Arc<Decision>) {
        self.route = route;
        self.session = session;
        self.builtin = Some(builtin);
        self.table = None;
    }

    /// Sets what the native built-in would decide.
    pub fn set_builtin(&mut self, builtin: Arc<Decision>) {
        self.builtin = Some(builtin);
    }

    /// What the native built-in would decide.
    pub fn builtin(&self) -> Option<Arc<Decision>> {
        self.builtin.clone()
    }

    /// Sets what is known when the turn has ended.
    pub fn finish(&mut self, end: EndFacts) {
        self.end = Some(end);
    }

    /// What is known of how the turn ended.
    pub fn end(&self) -> Option<&EndFacts> {
        self.end.as_ref()
    }

    /// What canaries tell sessions apart by: a number for the turn's session, or for the turn if it has none.
    pub fn side(&self) -> u64 {
        match &self.turn.turn.identity.session {
            Some(session) => xxh3_64(&session.key.0.to_le_bytes()),
            None => xxh3_64(self.turn.head.request_id.as_bytes()),
        }
    }

    /// From here on what is written is a shadow's: its store is `own`, on top of everybody's.
    pub fn begin_shadow(&mut self, own: &Arc<dyn PolicyStore>) -> Shadowed {
        let beneath = Arc::clone(&self.store);
        self.store = Arc::new(ShadowStore { own: Arc::clone(own), beneath: Arc::clone(&beneath) });
        self.spoken = Spoken::default();
        Shadowed { store: beneath, decision: self.decision.clone(), events: self.events.len() }
    }

    /// Takes back what a shadow did. The decision with what it wrote, and what it wrote about.
    pub fn end_shadow(&mut self, before: Shadowed) -> (Decision, Spoken) {
        self.store = before.store;
        self.events.truncate(before.events);
        let after = std::mem::replace(&mut self.decision, before.decision);
        if after.route.exclude != self.decision.route.exclude {
            self.table = None;
        }
        (after, self.spoken)
    }

    fn worker_facts(&self) -> WorkerFacts<'_> {
        WorkerFacts {
            candidates: self.route.candidates(),
            bound: self.route.bound,
            excluded: &self.route.excluded,
            excluded_by_policy: self.decision.route.exclude.as_deref().unwrap_or_default(),
            limits: &self.route.limits,
        }
    }

    fn fact(&mut self, name: &str) -> Option<Cow<'_, [u8]>> {
        if let Some(field) = name.strip_prefix("request.") {
            return self.turn.field(field).map(bytes_of);
        }
        match name {
            "api" => Some(Cow::Borrowed(b"1")),
            "request" => Some(bytes_of(Cow::Owned(self.turn.json()))),
            "workers.table" => {
                if self.table.is_none() {
                    self.table = Some(self.worker_facts().table());
                }
                self.table.as_deref().map(Cow::Borrowed)
            }
            "workers.bound" => self.worker_facts().bound_table().map(Cow::Owned),
            "workers" => Some(bytes_of(Cow::Owned(self.worker_facts().json()))),
            "session" => {
                let session = self.session.as_ref()?;
                let candidates = self.route.candidates();
                let worker = session.worker.and_then(|w| candidates.get(w)).map(|w| &*w.id);
                Some(bytes_of(Cow::Owned(turnstile_fleet::facts::session_json(session, worker))))
            }
            "session.worker" => {
                let worker = self.session.as_ref()?.worker?;
                let candidates = self.route.candidates();
                Some(bytes_of(Cow::Owned(candidates.get(worker)?.id.to_string())))
            }
            "session.mode" => Some(Cow::Borrowed(self.session.as_ref()?.mode.name().as_bytes())),
            "session.idle_ms" => number(self.session.as_ref()?.idle_ms),
            "session.held_tokens" => number(self.session.as_ref()?.held_tokens),
            "default" => {
                let builtin = self.builtin.as_ref()?;
                let text = turnstile_fleet::facts::default_json(builtin, &self.route.candidates());
                Some(bytes_of(Cow::Owned(text)))
            }
            "attempt" => number(u64::from(self.route.attempt)),
            "last_error" => self.route.last_error.as_ref().map(|e| Cow::Borrowed(e.as_bytes())),
            _ => self.end.as_ref().and_then(|end| end.field(name)).map(bytes_of),
        }
    }

    fn written(&self, name: &str) -> Option<String> {
        let value = self.decision.read(name)?;
        // A policy reads worker names as it would write them in a log: by id.
        match name {
            "route.target" => {
                let worker = self.decision.route.target?;
                Some(self.route.candidates().get(worker).map_or(value, |w| w.id.to_string()))
            }
            _ => Some(value),
        }
    }
}

fn bytes_of(text: Cow<'_, str>) -> Cow<'_, [u8]> {
    match text {
        Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
        Cow::Owned(text) => Cow::Owned(text.into_bytes()),
    }
}

fn number(value: u64) -> Option<Cow<'static, [u8]>> {
    Some(Cow::Owned(value.to_string().into_bytes()))
}

impl StreamEnv for PolicyEnv {
    fn property(&mut self, path: &[u8]) -> Option<Cow<'_, [u8]>> {
        let mut buffer = [0; facts::MAX_PATH];
        let name = facts::dotted(path, &mut buffer)?;
        if let Some(name) = name.strip_prefix("turnstile.") {
            return match self.written(name) {
                Some(value) => Some(Cow::Owned(value.into_bytes())),
                None => self.fact(name),
            };
        }
        if let Some(value) = self.written(name) {
            return Some(Cow::Owned(value.into_bytes()));
        }
        self.turn.standard_property(name)
    }

    fn set_property(&mut self, path: &[u8], value: &[u8]) -> Result<(), Status> {
        let mut buffer = [0; facts::MAX_PATH];
        let Some(name) = facts::dotted(path, &mut buffer) else {
            return Err(Status::BadArgument);
        };
        let candidates = Candidates::new(&self.route.workers, &self.route.cached_tokens);
        match self.decision.apply_write(name, value, &candidates) {
            Ok(()) => {
                self.spoken.note(name);
                // The table shows what policies excluded.
                if name.ends_with("route.exclude") {
                    self.table = None;
                }
            }
            Err(error) => {
                if self.dropped.len() < MAX_EVENTS {
                    self.dropped.push((name.to_owned(), error));
                }
            }
        }
        // SDKs panic on anything but OK: a bad write is dropped, counted and logged instead.
        Ok(())
    }

    fn header_map(&mut self, map: MapType) -> Option<&mut dyn HeaderPairs> {
        match map {
            MapType::RequestHeaders => Some(&mut self.headers),
            _ => None,
        }
    }

    fn call_foreign(&mut self, name: &str, arguments: &[u8]) -> Result<Cow<'_, [u8]>, Status> {
        match name {
            "turnstile.read" => {
                let hidden = self.hidden;
                bulk::read(self, arguments, hidden).map(Cow::Owned)
            }
            "turnstile.write" => bulk::write(self, arguments).map(Cow::Owned),
            "turnstile.prefix_match" => {
                facts::prefix_match(&self.route, arguments).map(|json| bytes_of(Cow::Owned(json)))
            }
            "turnstile.kv_get" => match self.store.get(arguments) {
                Some((value, _)) => Ok(Cow::Owned(value)),
                None => Err(Status::NotFound),
            },
            "turnstile.kv_entry" => facts::entry(&*self.store, arguments).map(|json| bytes_of(Cow::Owned(json))),
            "turnstile.kv_cas" => {
                facts::compare_and_set(&*self.store, arguments).map(|json| bytes_of(Cow::Owned(json)))
            }
            "turnstile.emit" => {
                let text = std::str::from_utf8(arguments).map_err(|_| Status::BadArgument)?;
                let event: serde_json::Value = serde_json::from_str(text).map_err(|_| Status::SerializationFailure)?;
                if arguments.len() > MAX_EVENT_BYTES || self.events.len() >= MAX_EVENTS {
                    return Err(Status::BadArgument);
                }
                self.events.push(event.to_string());
                Ok(Cow::Borrowed(b""))
            }
            _ => Err(Status::NotFound),
        }
    }
}
