//! Members and headers by which a client could steer a worker, or forge what the gateway says: one table of what they are and
//! what becomes of each.
//!
//! A worker trusts whoever sends it a request: it takes engine sessions, ranks, request ids and cache names from the body as
//! told. Whatever the table names is therefore dropped, refused, taken by the gateway's own rules, or passed where the
//! configuration trusts clients. Keys are compared with their escapes resolved, and every member of a repeated key goes.

mod page;

use std::sync::LazyLock;

use http::HeaderMap;
use sha2::{Digest, Sha256};
use turnstile_config::{Barred, Guarded, Namespace, Onward, PriorityMember, Steering};

use crate::body::{BodyError, Edits, Members, text_of};
use crate::identity::credential;
use crate::route::Route;

pub use page::page;

/// The header by which Dynamo names a cache namespace.
const TENANT_ID: &str = "x-tenant-id";

/// What becomes of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// It goes to the worker as it came.
    Pass,
    /// It is taken out.
    Drop,
    /// The request is refused, naming it.
    Refuse,
    /// It is replaced by a digest of it and the client's credential.
    Scope,
    /// As [`Action::Scope`]; a credential without a namespace gets one.
    Isolate,
    /// It is read by the gateway and taken out.
    Take,
}

/// The lines of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Rule {
    /// The worker's name of the request.
    Rid,
    /// The worker's session tag.
    SessionId,
    /// An engine session.
    SessionParams,
    /// The data-parallel rank.
    DpRank,
    /// Where prefill and decode meet.
    Bootstrap,
    /// Instructions to the cache storage.
    KvHints,
    /// Code to run.
    CustomLogitProcessor,
    /// The key of a schedule policy.
    RoutingKey,
    /// What images are taken to be.
    MmHashes,
    /// The worker's own.
    Internals,
    /// A cache namespace.
    CacheSalt,
    /// Likewise.
    ExtraKey,
    /// The adapter.
    LoraPath,
    /// The model's inside.
    ReturnHiddenStates,
    /// Labels of metrics.
    CustomLabels,
    /// Urgency.
    Priority,
    /// Headers that set members.
    OverrideHeaders,
    /// Dynamo's headers.
    DynamoHeaders,
    /// The gateway's own headers.
    TurnstileHeaders,
}

/// One line of the table.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The line.
    pub rule: Rule,
    /// Its option under `[steering]`, which is also its metric label. The gateway's own headers have none.
    pub key: &'static str,
    /// Members of the body.
    pub members: &'static [&'static str],
    /// Headers; a `*` at the end stands for any rest.
    pub headers: &'static [&'static str],
    /// What a worker does with it.
    pub worker: &'static str,
}

macro_rules! rows {
    ($($rule:ident $key:literal [$($member:literal)*] [$($header:literal)*] $worker:literal)*) => {
        /// The table.
        pub const ROWS: &[Row] = &[$(Row {
            rule: Rule::$rule, key: $key, members: &[$($member),*], headers: &[$($header),*], worker: $worker,
        }),*];

        /// The line of a member, and its name.
        fn of_member(name: &str) -> Option<(&'static str, Rule)> {
            match name {
                $($($member => Some(($member, Rule::$rule)),)*)*
                _ => None,
            }
        }
    };
}

rows! {
    Rid "rid" ["rid" "request_id"] []
        "names the request, and so what an abort hits; a name in use is refused (`request_id` on Responses only)"
    SessionId "session_id" ["session_id"] []
        "tags the request's cache as that session's, which is kept longer until somebody closes it"
    SessionParams "session_params" ["session_params"] []
        "on `/generate` appends to an engine session, whoever opened it; two turns at once can end the worker"
    DpRank "dp_rank" ["routed_dp_rank" "data_parallel_rank" "disagg_prefill_dp_rank"]
        ["x-data-parallel-rank" "x-dp-rank" "x-prefill-dp-rank"]
        "picks the data-parallel rank; the header wins over the body"
    Bootstrap "bootstrap" ["bootstrap_host" "bootstrap_port" "bootstrap_room" "bootstrap_pair_key" "decode_tp_size"] []
        "names the peer to take the cache from; a room in use breaks both requests"
    KvHints "kv_hints" ["kv_hints"] []
        "instructs the cache storage"
    CustomLogitProcessor "custom_logit_processor" ["custom_logit_processor"] []
        "runs the code in it, with `--enable-custom-logit-processor`"
    RoutingKey "routing_key" ["routing_key"] ["x-smg-*"]
        "orders the queue, with `--schedule-policy routing-key`"
    MmHashes "mm_hashes" ["mm_hashes" "mm_content_hashes"] []
        "takes an image's place in the prefix cache by it, without looking"
    Internals "internals"
        ["conversation_id" "http_worker_ipc" "lora_id" "received_time" "external_trace_header" "need_wait_for_mm_inputs"
         "num_items_assigned" "encoder_urls" "return_bytes" "log_metrics"] []
        "sends the answer elsewhere, waits for parts that never come, asks other hosts, leaves the request out of metrics"
    CacheSalt "cache_salt" ["cache_salt"] ["x-tenant-id"]
        "keeps the request's cache apart: only requests with the same value share it"
    ExtraKey "extra_key" ["extra_key"] []
        "likewise"
    LoraPath "lora_path" ["lora_path"] []
        "picks the adapter, as `model: \"base:adapter\"` does"
    ReturnHiddenStates "return_hidden_states" ["return_hidden_states"] []
        "adds the model's hidden states to the answer, with `--enable-return-hidden-states`"
    CustomLabels "custom_labels" ["custom_labels"] ["x-custom-labels"]
        "labels the worker's metrics, where its flags allow the label"
    Priority "priority" ["priority"] []
        "orders the queue and preempts, with `--enable-priority-scheduling`"
    OverrideHeaders "override_headers" [] ["x-override-*"]
        "sets rid, priority, rank and bootstrap members past the body, with `SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES`"
    DynamoHeaders "dynamo_headers" [] ["x-dynamo-*" "x-worker-instance-id" "x-prefill-instance-id"]
        "nothing; a Dynamo frontend is steered by them"
    TurnstileHeaders "" [] ["x-turnstile-*"]
        "nothing; they are the gateway's words"
}

/// What the configuration says of each line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SteeringOptions {
    actions: [Action; Rule::COUNT],
    refuses_headers: bool,
    credentials: Onward,
}

/// What steering does to one request.
#[derive(Clone, Debug, Default)]
pub struct Steered {
    /// The members to take out or to replace.
    pub(crate) edits: Edits,
    /// `cache_salt` as the worker gets it, as JSON.
    pub(crate) cache_salt: Option<Vec<u8>>,
    /// `extra_key` as the worker gets it, as JSON.
    pub(crate) extra_key: Option<Vec<u8>>,
    /// The members that are taken out or replaced.
    pub(crate) changed: Vec<&'static str>,
    /// What was found, other than passed.
    pub met: Vec<(Rule, Action)>,
}

/// Applies the table to a request. `named` is the namespace in `nvext.cache_salt`.
///
/// # Errors
/// A field is refused, or a namespace is neither text nor a list of texts.
pub fn steer(
    route: Route,
    headers: &HeaderMap,
    members: &Members,
    named: Option<&str>,
    options: &SteeringOptions,
) -> Result<Steered, BodyError> {
    let mut steered = Steered::default();
    for (member, rule) in members.keys().filter_map(of_member) {
        let action = options.action(rule);
        // A name that only one route knows is somebody else's on the others.
        let foreign = member == "request_id" && route != Route::Responses;
        if action == Action::Pass || foreign {
            continue;
        }
        // Of several members the last counts, as in the worker, and `null` asks for nothing.
        let asks = members.value(member).is_some();
        if action == Action::Refuse && asks && rule.is_read(route) {
            return Err(refused(member, rule));
        }
        if !matches!(action, Action::Scope | Action::Isolate) || !asks {
            steered.edits.remove(member);
            steered.changed.push(member);
        }
        if asks && !steered.met.contains(&(rule, action)) {
            steered.met.push((rule, action));
        }
    }
    if options.refuses_headers {
        let refuses = |name: &str| of_header(name).filter(|rule| options.action(*rule) == Action::Refuse);
        if let Some((name, rule)) = headers.keys().find_map(|name| Some((name, refuses(name.as_str())?))) {
            return Err(refused(name.as_str(), rule));
        }
    }
    let tenant_id = headers.get_all(TENANT_ID).iter().filter_map(|value| value.to_str().ok().map(str::trim));
    let named = tenant_id.rev().find(|text| !text.is_empty()).or(named.filter(|text| !text.is_empty()));
    let mut namespace = |rule, member, named| -> Result<Option<Vec<u8>>, BodyError> {
        let (value, changed) = namespace(rule, member, route, headers, members, named, options)?;
        if let (Some(value), true) = (&value, changed) {
            steered.edits.set(member, String::from_utf8_lossy(value).into_owned());
            steered.changed.push(member);
        }
        Ok(value)
    };
    let cache_salt = namespace(Rule::CacheSalt, "cache_salt", named)?;
    let extra_key = namespace(Rule::ExtraKey, "extra_key", None)?;
    Ok(Steered { cache_salt, extra_key, ..steered })
}

/// A namespace as the worker gets it, and whether that differs from what the client sent. A name from elsewhere comes before
/// the member, where the route takes one.
fn namespace(
    rule: Rule,
    member: &'static str,
    route: Route,
    headers: &HeaderMap,
    members: &Members,
    named: Option<&str>,
    options: &SteeringOptions,
) -> Result<(Option<Vec<u8>>, bool), BodyError> {
    let action = options.action(rule);
    let named = named.filter(|_| rule.is_read(route));
    // The worker takes an empty text as none.
    let raw = members.value(member).filter(|raw| **raw != *b"\"\"");
    let scope = |text: &str| digest(member, credential(headers), text);
    Ok(match (action, named, raw) {
        (Action::Pass, Some(named), _) => (Some(quoted(named)), true),
        (Action::Pass, None, raw) => (raw.map(|raw| raw.to_vec()), false),
        (Action::Scope | Action::Isolate, Some(named), _) => (Some(quoted(&scope(named))), true),
        (Action::Scope | Action::Isolate, None, Some(raw)) => {
            let scoped = match (text_of(&raw), serde_json::from_slice::<Vec<Option<String>>>(&raw)) {
                (Some(text), _) => quoted(&scope(&text)),
                // A batch has one for each of its prompts; an empty one is none.
                (None, Ok(list)) => {
                    let scoped = |text: &Option<String>| text.as_deref().filter(|t| !t.is_empty()).map(scope);
                    let own = || (action == Action::Isolate && credential(headers).is_some()).then(|| scope(""));
                    let list: Vec<String> =
                        list.iter().map(|text| scoped(text).or_else(own).unwrap_or_default()).collect();
                    serde_json::to_vec(&list).unwrap_or_default()
                }
                (None, Err(_)) => {
                    return Err(BodyError::bad_member(member, "must be a string, or a list of strings for a batch"));
                }
            };
            (Some(scoped), true)
        }
        (Action::Isolate, None, None) if rule.is_read(route) && credential(headers).is_some() => {
            (Some(quoted(&scope(""))), true)
        }
        _ => (None, false),
    })
}

fn quoted(text: &str) -> Vec<u8> {
    serde_json::to_vec(text).unwrap_or_default()
}

/// A name that only this credential can have. It is the same in every gateway and after every restart, or the worker's cache
/// would be cold each time.
fn digest(member: &str, credential: Option<&[u8]>, text: &str) -> String {
    let credential = credential.unwrap_or_default();
    let mut hash = Sha256::new();
    for part in [b"turnstile".as_slice(), member.as_bytes(), credential, text.as_bytes()] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

fn refused(field: &str, rule: Rule) -> BodyError {
    BodyError::bad_member(field, &format!("is not taken from clients (steering.{} = \"refuse\")", rule.row().key))
}

/// The line of a header. Names in a [`HeaderMap`] are lower case.
fn of_header(name: &str) -> Option<Rule> {
    // Every one of them begins so; most others do not.
    if !name.starts_with("x-") {
        return None;
    }
    // Patterns, without their `*` if they have one.
    static PATTERNS: LazyLock<Vec<(&str, bool, Rule)>> = LazyLock::new(|| {
        let of_row = |row: &'static Row| row.headers.iter().map(|pattern| (*pattern, row.rule));
        let patterns = ROWS.iter().flat_map(of_row);
        patterns.map(|(text, rule)| (text.trim_end_matches('*'), text.ends_with('*'), rule)).collect()
    });
    let fits = |(text, open, _): &&(&str, bool, Rule)| {
        name.as_bytes().get(2) == text.as_bytes().get(2) && if *open { name.starts_with(text) } else { name == *text }
    };
    PATTERNS.iter().find(fits).map(|(_, _, rule)| *rule)
}

// === impl Rule ===

impl Rule {
    const COUNT: usize = Self::TurnstileHeaders as usize + 1;

    /// The line.
    pub fn row(self) -> &'static Row {
        // The table has its lines in the order of this enumeration, as its test says.
        ROWS.get(self as usize).unwrap_or(&ROWS[0])
    }

    /// Whether a worker reads the members on this route. Elsewhere they ask for nothing, so they are dropped and not refused.
    pub fn is_read(self, route: Route) -> bool {
        match self {
            Self::Rid => route.takes_rid().is_some(),
            Self::SessionId => route.takes_session_id(),
            Self::SessionParams => route.takes_session_params(),
            Self::DpRank => route.takes_dp_rank(),
            Self::Bootstrap => route.generates(),
            Self::KvHints | Self::Internals | Self::MmHashes | Self::RoutingKey => route == Route::Generate,
            Self::CacheSalt | Self::ExtraKey => route.takes_cache_salt(),
            Self::CustomLogitProcessor | Self::CustomLabels | Self::ReturnHiddenStates => {
                matches!(route, Route::Chat | Route::Completions | Route::Generate)
            }
            Self::LoraPath => matches!(route, Route::Chat | Route::Completions | Route::Generate | Route::Embeddings),
            Self::Priority => route.takes_priority(),
            Self::OverrideHeaders | Self::DynamoHeaders | Self::TurnstileHeaders => true,
        }
    }

    /// What can be configured for it, the default first.
    pub fn choices(self) -> &'static [Action] {
        use Action::{Drop, Isolate, Pass, Refuse, Scope, Take};
        match self {
            Self::Rid | Self::SessionId | Self::Internals | Self::OverrideHeaders => &[Drop, Refuse],
            Self::SessionParams => &[Refuse, Drop],
            Self::DpRank | Self::Bootstrap | Self::KvHints | Self::RoutingKey | Self::MmHashes => &[Drop, Refuse, Pass],
            Self::CustomLogitProcessor => &[Refuse, Drop, Pass],
            Self::CacheSalt | Self::ExtraKey => &[Scope, Isolate, Drop, Refuse, Pass],
            Self::LoraPath | Self::ReturnHiddenStates | Self::CustomLabels => &[Pass, Drop, Refuse],
            Self::Priority => &[Take, Drop, Refuse],
            Self::DynamoHeaders => &[Drop, Pass],
            Self::TurnstileHeaders => &[Drop],
        }
    }
}

// === impl Action ===

impl Action {
    /// The word of the configuration, and of the metric label.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Drop => "drop",
            Self::Refuse => "refuse",
            Self::Scope => "scope",
            Self::Isolate => "isolate",
            Self::Take => "take",
        }
    }
}

impl From<Barred> for Action {
    fn from(barred: Barred) -> Self {
        match barred {
            Barred::Drop => Self::Drop,
            Barred::Refuse => Self::Refuse,
        }
    }
}

impl From<Guarded> for Action {
    fn from(guarded: Guarded) -> Self {
        match guarded {
            Guarded::Drop => Self::Drop,
            Guarded::Refuse => Self::Refuse,
            Guarded::Pass => Self::Pass,
        }
    }
}

impl From<Namespace> for Action {
    fn from(namespace: Namespace) -> Self {
        match namespace {
            Namespace::Scope => Self::Scope,
            Namespace::Isolate => Self::Isolate,
            Namespace::Drop => Self::Drop,
            Namespace::Refuse => Self::Refuse,
            Namespace::Pass => Self::Pass,
        }
    }
}

impl From<PriorityMember> for Action {
    fn from(priority: PriorityMember) -> Self {
        match priority {
            PriorityMember::Take => Self::Take,
            PriorityMember::Drop => Self::Drop,
            PriorityMember::Refuse => Self::Refuse,
        }
    }
}

impl From<Onward> for Action {
    fn from(onward: Onward) -> Self {
        match onward {
            Onward::Drop => Self::Drop,
            Onward::Pass => Self::Pass,
        }
    }
}

// === impl SteeringOptions ===

impl SteeringOptions {
    /// What the configuration says.
    pub fn from_config(config: &Steering) -> Self {
        let action = |rule: Rule| match rule {
            Rule::Rid => config.rid.into(),
            Rule::SessionId => config.session_id.into(),
            Rule::SessionParams => config.session_params.into(),
            Rule::DpRank => config.dp_rank.into(),
            Rule::Bootstrap => config.bootstrap.into(),
            Rule::KvHints => config.kv_hints.into(),
            Rule::CustomLogitProcessor => config.custom_logit_processor.into(),
            Rule::RoutingKey => config.routing_key.into(),
            Rule::MmHashes => config.mm_hashes.into(),
            Rule::Internals => config.internals.into(),
            Rule::CacheSalt => config.cache_salt.into(),
            Rule::ExtraKey => config.extra_key.into(),
            Rule::LoraPath => config.lora_path.into(),
            Rule::ReturnHiddenStates => config.return_hidden_states.into(),
            Rule::CustomLabels => config.custom_labels.into(),
            Rule::Priority => config.priority.into(),
            Rule::OverrideHeaders => config.override_headers.into(),
            Rule::DynamoHeaders => config.dynamo_headers.into(),
            Rule::TurnstileHeaders => Action::Drop,
        };
        let mut actions = [Action::Drop; Rule::COUNT];
        for (slot, row) in actions.iter_mut().zip(ROWS) {
            *slot = action(row.rule);
        }
        let refuses_headers = ROWS.iter().any(|row| !row.headers.is_empty() && action(row.rule) == Action::Refuse);
        Self { actions, refuses_headers, credentials: config.credentials }
    }

    /// For bodies that the gateway made itself: everything passes.
    pub fn trusting() -> Self {
        Self { actions: [Action::Pass; Rule::COUNT], refuses_headers: false, credentials: Onward::Pass }
    }

    /// What becomes of the fields of a line.
    pub fn action(&self, rule: Rule) -> Action {
        self.actions.get(rule as usize).copied().unwrap_or(Action::Drop)
    }

    /// Whether a request header ends here. Names in a [`HeaderMap`] are lower case.
    pub fn stops(&self, header: &str) -> bool {
        // What names a namespace has been taken.
        header == TENANT_ID || of_header(header).is_some_and(|rule| self.action(rule) != Action::Pass)
    }

    /// Whether the client's credential goes to workers without one of their own.
    pub fn passes_credentials(&self) -> bool {
        self.credentials == Onward::Pass
    }
}

impl Default for SteeringOptions {
    fn default() -> Self {
        Self::from_config(&Steering::default())
    }
}

#[cfg(test)]
#[path = "steering_tests.rs"]
mod tests;
