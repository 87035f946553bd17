//! One inference request, understood: everything later steps decide on, and the bodies they send.
//!
//! [`understand`] reads the request once. A [`Turn`] never changes afterwards; what a step wants to send is made from it with
//! [`Turn::upstream_body`].

use bytes::Bytes;
use http::HeaderMap;

use crate::body::{BodyError, Edits, Members, Pieces, rewrite, rewrite_pieces, scan};
use crate::hints::{Hints, SessionControl, UnknownKeys, parse};
use crate::identity::{Identity, IdentityOptions, identify};
use crate::observe::ObserveOptions;
use crate::prefix::{Namespaces, PrefixHashes, PrefixOptions, hash};
use crate::route::Route;
use crate::steering::{Action, Rule, Steered, SteeringOptions, steer};

/// How to understand requests.
#[derive(Clone, Debug)]
pub struct UnderstandOptions {
    /// Tenant, session and header options.
    pub identity: IdentityOptions,
    /// Block hashing.
    pub prefix: PrefixOptions,
    /// What becomes of members that would steer a worker.
    pub steering: SteeringOptions,
}

/// One inference request, immutable.
#[derive(Clone, Debug)]
pub struct Turn {
    /// The route it came in on.
    pub route: Route,
    /// The model asked for; none leaves the choice to the worker.
    pub model: Option<String>,
    /// Whether a stream was asked for. What really comes back says its content type.
    pub stream: bool,
    /// How many answers were asked for, at least 1.
    pub n: u32,
    /// The limit on output tokens, if given.
    pub max_tokens: Option<u64>,
    /// The body as it left the filters.
    pub body: Bytes,
    /// Its top-level members.
    pub members: Members,
    /// Scheduling hints, headers applied.
    pub hints: Hints,
    /// The session request.
    pub control: SessionControl,
    /// Who is asking.
    pub identity: Identity,
    /// Prefix hashes and prompt size.
    pub prefix: PrefixHashes,
    /// Whether the client itself asked for usage in the stream (`stream_options.include_usage`).
    pub asked_usage: bool,
    /// Whether the client itself asked for `return_cached_tokens_details`.
    pub asked_cached_details: bool,
    /// Unknown keys under `nvext`.
    pub unknown_hint_keys: UnknownKeys,
    /// Hint and identity headers that could not be read.
    pub malformed_headers: u32,
    /// What the steering table says of its members.
    pub steered: Steered,
}

/// What the gateway adds to the body for a worker. Whatever the route does not take is left out.
#[derive(Clone, Copy, Debug, Default)]
pub struct UpstreamPlan<'a> {
    /// The engine's request id, unique per attempt.
    pub rid: Option<&'a str>,
    /// The engine's priority, signed.
    pub priority: Option<i64>,
    /// The radix tag: top-level `session_id`.
    pub session_id: Option<&'a str>,
    /// A streaming session: `session_params.id`. Excludes `session_id`, which the engine refuses beside it.
    pub session_params_id: Option<&'a str>,
    /// The data-parallel rank to pin.
    pub dp_rank: Option<u32>,
    /// Ask the worker for usage and cached tokens where the client did not. Pass the plan to [`Turn::observe_options`] so
    /// that the answer to it is taken out again.
    pub ask_usage: bool,
}

/// Reads a request.
///
/// # Errors
/// The body is not a JSON object, a member that the gateway reads has the wrong type, or one is there that it refuses; the
/// error is a 400 for the client.
pub fn understand(
    route: Route,
    headers: &HeaderMap,
    body: Bytes,
    options: &UnderstandOptions,
) -> Result<Turn, BodyError> {
    let members = scan(&body)?;
    let takes_priority = options.steering.action(Rule::Priority) == Action::Take;
    let extension = parse(&members, headers, options.identity.id_max_bytes, takes_priority)?;
    let steered = steer(route, headers, &members, extension.cache_salt.as_deref(), &options.steering)?;
    let model = match members.raw("model") {
        None | Some(b"null") => None,
        Some(_) => match members.string("model") {
            Some(model) => Some(model.into_owned()),
            None => return Err(BodyError::bad_member("model", "must be a string")),
        },
    };
    let identity = identify(route, headers, &members, &extension.control, &options.identity);
    if extension.control.action.is_some() && identity.session.is_none() {
        return Err(BodyError::bad_member("nvext.session_control.session_id", "is required with an action"));
    }
    let namespaces = Namespaces { cache_salt: steered.cache_salt.as_deref(), extra_key: steered.extra_key.as_deref() };
    let prefix = hash(route, &members, &identity, namespaces, &options.prefix);
    let stream_options = nested(&members, "stream_options");
    Ok(Turn {
        route,
        model,
        stream: members.truthy("stream"),
        n: answers(route, &members),
        max_tokens: max_tokens(route, &members),
        asked_usage: stream_options.as_ref().is_some_and(|o| o.truthy("include_usage")),
        asked_cached_details: members.truthy("return_cached_tokens_details"),
        malformed_headers: extension.malformed_headers.saturating_add(identity.malformed_headers),
        hints: extension.hints,
        control: extension.control,
        unknown_hint_keys: extension.unknown,
        steered,
        identity,
        prefix,
        members,
        body,
    })
}

/// The members of a member that is an object.
fn nested(members: &Members, key: &str) -> Option<Members> {
    scan(&members.value(key)?).ok()
}

fn answers(route: Route, members: &Members) -> u32 {
    let n = match route {
        Route::Generate => nested(members, "sampling_params").and_then(|p| p.unsigned("n")),
        _ => members.unsigned("n"),
    };
    n.and_then(|n| u32::try_from(n).ok()).unwrap_or(1).max(1)
}

fn max_tokens(route: Route, members: &Members) -> Option<u64> {
    match route {
        Route::Generate => nested(members, "sampling_params").and_then(|p| p.unsigned("max_new_tokens")),
        Route::Responses => members.unsigned("max_output_tokens"),
        // The newer name wins where a client sends both.
        Route::Chat => members.unsigned("max_completion_tokens").or_else(|| members.unsigned("max_tokens")),
        _ => members.unsigned("max_tokens"),
    }
}

// === impl Turn ===

impl Turn {
    /// The estimated prompt length in tokens.
    pub fn prompt_tokens(&self, bytes_per_token: f64) -> u64 {
        // A float cast saturates, so a silly ratio gives a silly number and nothing worse.
        (self.prefix.bytes as f64 / bytes_per_token.max(0.1)).ceil() as u64
    }

    /// Members of the client's body that the steering table takes out or replaces.
    pub fn steering_members(&self) -> &[&'static str] {
        &self.steered.changed
    }

    /// The body for a worker: the client's, byte for byte, except for `nvext`, what the steering table takes out or replaces,
    /// and what the plan sets.
    pub fn upstream_body(&self, plan: &UpstreamPlan<'_>) -> Pieces {
        let mut edits = self.base_edits();
        self.steer(plan, &mut edits);
        if plan.ask_usage {
            if self.asks_for_usage()
                && let Some(value) = self.stream_options_with_usage()
            {
                edits.set("stream_options", value);
            }
            if self.asks_for_cached_details() {
                edits.set("return_cached_tokens_details", "true");
            }
        }
        rewrite_pieces(&self.members, &edits)
    }

    /// How to watch the answer to [`Turn::upstream_body`] with the same plan: what only our asking caused is taken out.
    pub fn observe_options(&self, plan: &UpstreamPlan<'_>, collect_reply: bool) -> ObserveOptions {
        ObserveOptions {
            strip_usage: plan.ask_usage && self.asks_for_usage() && self.stream_options_with_usage().is_some(),
            strip_cached_details: plan.ask_usage && self.asks_for_cached_details(),
            cached_details_asked: self.asked_cached_details || (plan.ask_usage && self.asks_for_cached_details()),
            clean_errors: true,
            collect_reply,
            ..ObserveOptions::default()
        }
    }

    /// Removes what never reaches a worker.
    pub(crate) fn base_edits(&self) -> Edits {
        let mut edits = self.steered.edits.clone();
        if self.members.contains("nvext") {
            edits.remove("nvext");
        }
        edits
    }

    /// Sets what the route takes of the plan.
    pub(crate) fn steer(&self, plan: &UpstreamPlan<'_>, edits: &mut Edits) {
        let route = self.route;
        if let (Some(rid), Some(member)) = (plan.rid, route.takes_rid()) {
            edits.set_string(member, rid);
        }
        if let Some(priority) = plan.priority.filter(|_| route.takes_priority()) {
            edits.set("priority", priority.to_string());
        }
        match plan.session_params_id.filter(|_| route.takes_session_params()) {
            Some(id) => {
                let id = serde_json::to_string(id).unwrap_or_else(|_| String::from("\"\""));
                edits.set("session_params", format!("{{\"id\":{id}}}"));
            }
            None => {
                if let Some(id) = plan.session_id.filter(|_| route.takes_session_id()) {
                    edits.set_string("session_id", id);
                }
            }
        }
        if let Some(rank) = plan.dp_rank.filter(|_| route.takes_dp_rank()) {
            edits.set("routed_dp_rank", rank.to_string());
            edits.remove("data_parallel_rank");
        }
    }

    /// Streams of chat and completions tell their usage only when asked; everything else tells it anyway. Seen on 0.5.23:
    /// asking adds one last chunk and changes no other.
    fn asks_for_usage(&self) -> bool {
        self.stream && self.route.takes_stream_options() && !self.asked_usage
    }

    /// `usage.prompt_tokens_details` needs a flag of the worker, the details do not.
    fn asks_for_cached_details(&self) -> bool {
        self.route.takes_cached_details() && !self.asked_cached_details
    }

    /// The client's stream options with usage switched on; none if they are of a type that the worker will refuse.
    fn stream_options_with_usage(&self) -> Option<String> {
        match self.members.value("stream_options") {
            None => Some("{\"include_usage\":true}".into()),
            Some(raw) => {
                let options = scan(&raw).ok()?;
                let merged = rewrite(&options, Edits::new().set("include_usage", "true"));
                String::from_utf8(merged.into()).ok()
            }
        }
    }
}

#[cfg(test)]
#[path = "turn_tests.rs"]
mod tests;
