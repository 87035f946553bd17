//! The table.

use super::{DecisionName, EventRow, Fact, Function, When, WorkerMember};
use turnstile_config::PluginEvent;

const fn fact(name: &'static str, ty: &'static str, unit: &'static str, when: When, meaning: &'static str) -> Fact {
    Fact { name, ty, unit, when, meaning }
}

const ALWAYS: When = When::ALWAYS;

/// Every fact.
pub const FACTS: &[Fact] = &[
    fact("api", "integer", "", ALWAYS, "version of this interface: `1`"),
    fact(
        "request",
        "JSON object",
        "",
        ALWAYS,
        "all of the single facts below except `request.affinity_hash`; `null` for what is not known",
    ),
    fact("request.model", "text", "", ALWAYS, "model asked for"),
    fact(
        "request.route",
        "text",
        "",
        ALWAYS,
        "`chat`, `completions`, `generate`, `responses`, `messages`, `count_tokens`, `embeddings`, `rerank`, `score`, \
         `tokenize`, `detokenize`",
    ),
    fact("request.protocol", "text", "", ALWAYS, "`openai`, `responses`, `anthropic`, `native`"),
    fact("request.stream", "boolean", "", ALWAYS, "whether the answer streams"),
    fact("request.session", "text", "", ALWAYS, "session id, as the client wrote it"),
    fact("request.tree", "text", "", ALWAYS, "id of the root session of the agent's tree"),
    fact("request.parent", "text", "", ALWAYS, "session id of the parent agent"),
    fact(
        "request.tenant",
        "text",
        "",
        ALWAYS,
        "16 hexadecimal digits, derived from the caller's credential with a secret key",
    ),
    fact("request.agent", "text", "", ALWAYS, "the agent client, as far as recognised"),
    fact("request.source", "text", "", ALWAYS, "where the session id was found"),
    fact(
        "request.action",
        "text",
        "",
        ALWAYS,
        "`bind`, `open` or `close`, if the client asked; a header that marks the last turn is `close`",
    ),
    fact("request.timeout_s", "number", "s", ALWAYS, "idle timeout asked for"),
    fact("request.turn", "integer", "", ALWAYS, "number of this turn in its session, from 1"),
    fact("request.priority", "integer", "", ALWAYS, "signed; larger is more urgent"),
    fact("request.strict_priority", "integer", "", ALWAYS, "tier, 0 or more"),
    fact("request.latency_sensitivity", "number", "s", ALWAYS, "head start asked for, in the older form of the hint"),
    fact("request.osl", "integer", "tokens", ALWAYS, "output length that the client expects"),
    fact("request.max_tokens", "integer", "tokens", ALWAYS, "most that the answer may have"),
    fact(
        "request.speculative_prefill",
        "boolean",
        "",
        ALWAYS,
        "whether the client asked for its next turn to be warmed",
    ),
    fact("request.prompt_tokens", "integer", "tokens", ALWAYS, "prompt length, estimated from bytes"),
    fact("request.body_bytes", "integer", "bytes", ALWAYS, "size of the body"),
    fact(
        "request.affinity_hash",
        "integer",
        "",
        ALWAYS,
        "unsigned 64-bit number that breaks ties: equal for turns that belong together, the same on every gateway",
    ),
    fact(
        "session",
        "JSON object",
        "",
        ALWAYS,
        "the turn's live session: {worker, rank, mode, age_ms, idle_ms, turns, held_tokens, last_cached_tokens, \
         engine_open}; in the phase `admit` without a worker",
    ),
    fact("session.worker", "text", "", When::ROUTE, "id of its worker; not there either if that worker is gone"),
    fact(
        "session.mode",
        "text",
        "",
        ALWAYS,
        "`affinity`, `tag` or `stream`; once a policy of the chain wrote this decision, that is what is read",
    ),
    fact("session.idle_ms", "integer", "ms", ALWAYS, "time since its last turn ended"),
    fact("session.held_tokens", "integer", "tokens", ALWAYS, "tokens that it holds on the worker"),
    fact(
        "workers",
        "JSON array",
        "",
        ALWAYS,
        "the workers of the turn's pool, in order of their index, with the members below; some microseconds per worker for \
         most JSON readers. Empty in the phase `admit`",
    ),
    fact(
        "workers.table",
        "bytes",
        "",
        ALWAYS,
        "the same as fixed records, without ids and labels. Empty in the phase `admit`",
    ),
    fact("workers.bound", "bytes", "", When::ROUTE, "a table of the one worker that holds the turn's session"),
    fact(
        "default",
        "JSON object",
        "",
        ALWAYS,
        "what the native built-in would decide: {target, scores: {id: cost in ms}, reason, queue: {tier, priority}, session: \
         {action, mode}}; in the phase `admit` without a target",
    ),
    fact("attempt", "integer", "", ALWAYS, "`0`, then the number of the retry"),
    fact("last_error", "text", "", When::ROUTE, "why the attempt before failed"),
    fact("worker", "text", "", When::END, "id of the worker that served the turn"),
    fact("status", "integer", "", When::END, "HTTP status for the client"),
    fact(
        "finish_reason",
        "text",
        "",
        When::END,
        "`stop`, `length`, `tool_calls`, …; not there if generation was cut off",
    ),
    fact(
        "usage",
        "JSON object",
        "tokens",
        When::END,
        "{prompt_tokens, completion_tokens, cached_tokens}, as the worker reported",
    ),
    fact("cached_tokens", "integer", "tokens", When::END, "prompt tokens that came from the worker's cache"),
    fact("ttft_ms", "number", "ms", When::END, "time to the first event, waiting included"),
];

const fn member(
    name: &'static str,
    at: usize,
    ty: &'static str,
    unit: &'static str,
    meaning: &'static str,
) -> WorkerMember {
    WorkerMember { name, place: Some((at, ty)), unit, meaning }
}

/// Every member of a worker.
pub const WORKER_MEMBERS: &[WorkerMember] = &[
    WorkerMember { name: "id", place: None, unit: "", meaning: "id in the configuration, by default host:port" },
    WorkerMember { name: "labels", place: None, unit: "", meaning: "object of labels from the configuration" },
    member("index", 0, "u32", "", "names it in decisions; the same as long as the gateway runs"),
    member(
        "state",
        4,
        "u32",
        "",
        "0 `ready`, 1 `draining`, 2 `unhealthy` (its probes fail, or it is ejected), 3 `starting`",
    ),
    member("capabilities", 8, "u32", "", "bits: 1 `tag`, 2 `stream`, 4 `priority`; names in the JSON"),
    member("in_flight", 12, "u32", "requests", "of this gateway in flight"),
    member("running", 16, "u32", "requests", "running, as the worker reports"),
    member("waiting", 20, "u32", "requests", "waiting there, as it reports"),
    member("max_running", 24, "u32", "requests", "most that it runs; 0: not known"),
    member("bound", 28, "u32 bit 1", "", "it holds the turn's session"),
    member("at_limit", 28, "u32 bit 2", "", "it would queue another turn"),
    member("excluded", 28, "u32 bit 4", "", "it is not to be used for this turn"),
    member("waiting_uncached_tokens", 32, "u64", "tokens", "to be prefilled for the requests waiting there"),
    member("kv_used_tokens", 40, "u64", "tokens", "KV in use"),
    member("kv_capacity_tokens", 48, "u64", "tokens", "KV pool; 0: not known"),
    member("cached_tokens", 56, "u64", "tokens", "of this turn's prompt that are probably cached there"),
    member("prefill_tokens_per_s", 64, "f64", "tokens/s", "measured prefill rate"),
    member("ttft_ms", 72, "f64", "ms", "average time to first token"),
    member("itl_ms", 80, "f64", "ms", "average time between tokens"),
    member("pending_prefill_tokens", 88, "u64", "tokens", "uncached, of our turns there that have not answered yet"),
    member("expected_decode_tokens", 96, "u64", "tokens", "of output expected of our turns in flight there"),
];

const fn decision(
    name: &'static str,
    value: &'static str,
    when: When,
    sample: &'static str,
    meaning: &'static str,
) -> DecisionName {
    DecisionName { name, value, when, sample, meaning }
}

const DECIDING: When = When::DECIDING;

/// Every decision. `log.NAME` stands for all of that kind.
pub const DECISIONS: &[DecisionName] = &[
    decision("route.target", "worker", When::ROUTING, "a", "where the turn goes"),
    decision(
        "route.fallbacks",
        "workers, comma separated",
        When::ROUTING,
        "a,#1",
        "where it goes next if the target fails before it answered",
    ),
    decision(
        "route.exclude",
        "workers, comma separated",
        DECIDING,
        "a",
        "not to be used for this turn; unknown names are ignored, so in the phase `admit` all are",
    ),
    decision(
        "route.scores",
        "JSON {worker: number}",
        When::ROUTING,
        r##"{"#0": 1.5}"##,
        "cost in ms, lower is better; for the decision log and for policies that follow",
    ),
    decision("route.reason", "text, 256 bytes", DECIDING, "because", "why, for the decision log"),
    decision("queue.tier", "integer, 0 or more, 32 bits", DECIDING, "1", "higher always goes first"),
    decision(
        "queue.priority",
        "number, s, signed",
        DECIDING,
        "-1.5",
        "head start against arrival; bounded by `admission.max_head_start_s`",
    ),
    decision(
        "queue.deadline_ms",
        "integer, ms, up to a day",
        DECIDING,
        "100",
        "give up waiting after this; bounded by `admission.max_wait_ms`",
    ),
    decision("queue.flow", "text, 256 bytes", DECIDING, "flow", "turns of one flow share one fair part"),
    decision(
        "session.action",
        "`bind`, `open`, `close`, `release`, `none`",
        DECIDING,
        "open",
        "bind: keep it on one worker. open: on the engine too. close: end it after this turn. release: forget the binding",
    ),
    decision(
        "session.key",
        "text, 256 bytes",
        DECIDING,
        "key",
        "session id instead of the client's, in the same tenant",
    ),
    decision(
        "session.ttl_s",
        "number, s, up to 30 days",
        DECIDING,
        "1.5",
        "idle timeout, from the end of a turn. Absent: a new session gets `sessions.default_timeout_s`, a live one keeps its \
         own",
    ),
    decision(
        "session.mode",
        "`affinity`, `tag`, `stream`, `auto`",
        DECIDING,
        "tag",
        "how an opened session takes part in the engine. Absent: a live session keeps its own",
    ),
    decision("prefill", "`on`, `off`", DECIDING, "off", "whether the next turn is warmed after this one"),
    decision(
        "engine.priority",
        "integer, signed, 64 bits; or `none`",
        DECIDING,
        "-3",
        "what the worker is sent as `priority`, where it takes one",
    ),
    decision(
        "log.NAME",
        "text, 1 KiB",
        DECIDING,
        "note",
        "into the decision log; at most 16 per turn; NAME of letters, digits, `_`, `-`, `.`, 64 bytes",
    ),
];

/// Every function.
pub const FUNCTIONS: &[Function] = &[
    Function {
        name: "turnstile.read",
        argument: "names of properties, one a line, 64 at most",
        result: "their values in that order, each its length (u32, little endian) and its bytes; length 4294967295 for what is \
                 not there",
        sample: b"turnstile.api",
    },
    Function {
        name: "turnstile.write",
        argument: "properties, 64 at most, each as its name and its value, each of these as its length (u32, little endian) and \
                   its bytes",
        result: "how many there were, as text; bad writes are dropped and counted",
        sample: b"",
    },
    Function {
        name: "turnstile.prefix_match",
        argument: "empty, or JSON {\"worker\": name}",
        result: "JSON {id: tokens of this turn's prompt that are probably cached there}",
        sample: b"",
    },
    Function { name: "turnstile.kv_get", argument: "key", result: "value; NOT_FOUND", sample: b"key" },
    Function {
        name: "turnstile.kv_entry",
        argument: "key",
        result: "JSON {\"value\", \"cas\"}: the value as text, and its number for `turnstile.kv_cas`; NOT_FOUND",
        sample: b"key",
    },
    Function {
        name: "turnstile.kv_cas",
        argument: "JSON {\"key\", \"value\", \"cas\"} (two texts and a number; `cas` as `turnstile.kv_entry` gave it: only if \
                   nobody has written since; 0 or absent: whatever is there)",
        result: "JSON {\"stored\": boolean}",
        sample: br#"{"key": "key", "value": "value"}"#,
    },
    Function {
        name: "turnstile.emit",
        argument: "any JSON, up to 4 KiB",
        result: "nothing; the event stands in the decision log; at most 16 per turn",
        sample: b"{}",
    },
];

/// Every event, in the order in which they come.
pub const EVENTS: &[EventRow] = &[
    EventRow {
        kind: PluginEvent::FirstToken,
        members: &[],
        when: "once, for a stream that brings tokens; before everything else",
    },
    EventRow {
        kind: PluginEvent::ToolCall,
        members: &[
            ("number", "place among the calls of the answer, from 0"),
            ("name", "the tool's name, text, cut to 128 bytes"),
        ],
        when: "for each call, as soon as its name is there; 64 at most",
    },
    EventRow {
        kind: PluginEvent::Finish,
        members: &[("reason", "why, in the word of the route's protocol, text, cut to 64 bytes")],
        when: "when generation has ended; for each answer if several were asked for, 64 at most",
    },
    EventRow {
        kind: PluginEvent::Usage,
        members: &[
            ("prompt_tokens?", "tokens of the prompt, cached ones included"),
            ("completion_tokens?", "tokens generated"),
            ("cached_tokens?", "tokens of the prompt that were cached"),
        ],
        when: "once, when the answer has ended, if the worker told anything of it",
    },
    EventRow {
        kind: PluginEvent::End,
        members: &[
            ("outcome", "how the request ended, text: the access log's `end`"),
            ("status", "the status that the client got; 499 if it left first"),
            ("left_out", "events that were not told because there were too many of their kind"),
        ],
        when: "once for every request that the plugin has seen, however it ended; the last",
    },
];
