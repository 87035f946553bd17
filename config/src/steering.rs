//! What becomes of request members and headers that would steer a worker or forge what the gateway says.

use std::{borrow::Cow, net::IpAddr};

use ipnet::IpNet;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// Request members and headers that would steer a worker or forge what the gateway says. `docs/steering.md` lists them all.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Steering {
    /// `rid`, and `request_id` of Responses: the worker's name of a request, by which it is aborted. Each attempt gets one
    /// of the gateway's.
    pub rid: Barred,
    /// `session_id`: the worker's own session tag. Sessions are named by `nvext` and headers, and the gateway tags.
    pub session_id: Barred,
    /// `session_params`: an engine session, where the route honours it (`/generate`); elsewhere it is dropped.
    pub session_params: Barred,
    /// `routed_dp_rank`, `data_parallel_rank`, `disagg_prefill_dp_rank`, and the headers for the same.
    pub dp_rank: Guarded,
    /// `bootstrap_host`, `bootstrap_port`, `bootstrap_room`, `bootstrap_pair_key`, `decode_tp_size`: how a prefill and a
    /// decode worker meet.
    pub bootstrap: Guarded,
    /// `kv_hints`: instructions to the worker's cache storage.
    pub kv_hints: Guarded,
    /// `custom_logit_processor`: code that the worker runs, if it was started to do so.
    pub custom_logit_processor: Guarded,
    /// `routing_key`, and the headers `x-smg-*`: the key of the worker's `routing-key` schedule policy.
    pub routing_key: Guarded,
    /// `mm_hashes`, `mm_content_hashes`: what the worker takes an image to be, whatever it is.
    pub mm_hashes: Guarded,
    /// Members that are the worker's alone, such as `http_worker_ipc` and `encoder_urls`.
    pub internals: Barred,
    /// `cache_salt`, `nvext.cache_salt` and the header `x-tenant-id`: the name of a cache of its own. `/v1/messages` has no such
    /// member, so its requests share one cache whatever this says.
    pub cache_salt: Namespace,
    /// `extra_key`: likewise.
    pub extra_key: Namespace,
    /// `lora_path`: the adapter to use.
    pub lora_path: Guarded,
    /// `return_hidden_states`: megabytes of the model's inside, if the worker was started to give them.
    pub return_hidden_states: Guarded,
    /// `custom_labels` and the header `x-custom-labels`: labels of the worker's metrics, if it was started to take them.
    pub custom_labels: Guarded,
    /// `priority`: urgency, as in `nvext.agent_hints`.
    pub priority: PriorityMember,
    /// The headers `x-override-*`, which set the members above past the body.
    pub override_headers: Barred,
    /// The headers `x-dynamo-*` and their aliases, once the gateway has read what it knows of them.
    pub dynamo_headers: Onward,
    /// The client's `authorization` and `x-api-key`, for workers without a key of their own in the configuration. With one,
    /// they never get the client's.
    pub credentials: Onward,
}

/// The headers that tell a worker who its client is: `x-forwarded-for`, `x-forwarded-proto`, `x-forwarded-host`,
/// `x-forwarded-port`, `x-real-ip` and `forwarded`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Forwarded {
    /// What workers are told.
    pub send: ForwardedSend,
    /// Proxies whose word is believed, as addresses or networks (`10.0.0.0/8`). What any other peer says in these headers
    /// is dropped.
    pub trusted: Vec<Network>,
}

/// What workers are told of their client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ForwardedSend {
    /// The peer's address, the scheme and the host; behind a trusted proxy its words, with the proxy added.
    #[default]
    Set,
    /// Nothing.
    None,
}

/// A field that is never passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Barred {
    /// Taken out.
    Drop,
    /// The request is answered 400, naming the field.
    Refuse,
}

/// A field that may be passed on where clients are trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Guarded {
    /// Taken out.
    Drop,
    /// The request is answered 400, naming the field.
    Refuse,
    /// Left as the client sent it.
    Pass,
}

/// The name of a cache namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Namespace {
    /// Replaced by a digest of it and the client's credential: the same name of another credential is another namespace.
    Scope,
    /// As `scope`; and a request that names none, but has a credential, gets its credential's own namespace. Nothing is then
    /// shared between credentials, not even a common system prompt.
    Isolate,
    /// Taken out: all requests share the cache.
    Drop,
    /// The request is answered 400, naming the field.
    Refuse,
    /// Left as the client sent it: whoever knows a name shares its cache.
    Pass,
}

/// What a `priority` member counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PriorityMember {
    /// Read as the hint of that name; the worker gets what the policies make of it.
    Take,
    /// Taken out; the hint in `nvext` still counts.
    Drop,
    /// The request is answered 400, naming the field.
    Refuse,
}

/// Whether a header goes on to workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Onward {
    /// It ends here.
    Drop,
    /// It goes on.
    Pass,
}

/// A network, or a single address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Network(IpNet);

/// The text is no network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected an IP address or a network, such as 10.0.0.0/8")]
pub struct NotANetwork;

// === impl Steering ===

impl Default for Steering {
    fn default() -> Self {
        Self {
            rid: Barred::Drop,
            session_id: Barred::Drop,
            session_params: Barred::Refuse,
            dp_rank: Guarded::Drop,
            bootstrap: Guarded::Drop,
            kv_hints: Guarded::Drop,
            custom_logit_processor: Guarded::Refuse,
            routing_key: Guarded::Drop,
            mm_hashes: Guarded::Drop,
            internals: Barred::Drop,
            cache_salt: Namespace::Scope,
            extra_key: Namespace::Scope,
            lora_path: Guarded::Pass,
            return_hidden_states: Guarded::Pass,
            custom_labels: Guarded::Pass,
            priority: PriorityMember::Take,
            override_headers: Barred::Drop,
            dynamo_headers: Onward::Drop,
            credentials: Onward::Pass,
        }
    }
}

// === impl Network ===

impl Network {
    /// Whether the address lies in the network. An IPv4 address may come in its IPv6 form.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.contains(&address.to_canonical())
    }
}

impl std::str::FromStr for Network {
    type Err = NotANetwork;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let address = text.parse::<IpAddr>().map(IpNet::from);
        address.or_else(|_| text.parse()).map(Self).map_err(|_| NotANetwork)
    }
}

impl TryFrom<String> for Network {
    type Error = NotANetwork;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Network> for String {
    fn from(network: Network) -> Self {
        network.to_string()
    }
}

impl std::fmt::Display for Network {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.prefix_len() == self.0.max_prefix_len() { self.0.addr().fmt(f) } else { self.0.fmt(f) }
    }
}

impl JsonSchema for Network {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Network".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "format": "network" })
    }
}
