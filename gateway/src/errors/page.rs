//! `docs/errors.md`, written from the table.

use super::{Blame, Kind, Refusal};
use std::fmt::Write;
use turnstile_fleet::route::Protocol;

const INTRODUCTION: &str = "\
# Errors

<!-- Generated from the table in gateway/src/errors.rs: UPDATE_DOCS=1 cargo nextest run -p turnstile -E 'test(docs_are_fresh)' -->

Every error a client gets is one of the lines below, in the shape of the protocol that it asked, whether the gateway or a
worker found it. The body is JSON; `x-request-id` is the id under which the logs have it.

| protocol | paths | shape |
| --- | --- | --- |
| OpenAI | `/v1/chat/completions`, `/v1/completions`, `/v1/embeddings`, `/v1/rerank`, `/v1/score`, unknown paths | `{\"error\":{\"message\",\"type\",\"param\",\"code\"}}` |
| Responses | `/v1/responses` | the same |
| Anthropic | `/v1/messages`, `/v1/messages/count_tokens` | `{\"type\":\"error\",\"error\":{\"type\",\"message\"}}` |
| native | `/generate`, `/tokenize`, `/detokenize` | `{\"error\":{\"message\",\"code\"}}` |

## The table

`param` is the field at fault, where one is known. With `admission.overload_status = 429` the lines marked * answer 429 with
the type `rate_limit_error`.
";

const REST: &str = "
## What a worker says

Another worker is tried first where that can help (`[retry]`). What the last one said is then put into the table's words; none
of its headers go on. A message keeps what helps a client: which field, and why. It does not keep file names, network
addresses, request ids, stack traces, or the request that SGLang quotes, and is at most 512 bytes long.

| from the worker | to the client |
| --- | --- |
| 400, 422 and other 4xx | `request_refused` with that status and the worker's reason; `context_length_exceeded` where the prompt is too long (for Anthropic the message then begins with `prompt is too long`) |
| 401 | `invalid_credential` where the client's credential went on to the worker; `worker_key_refused` where the worker has a key in the configuration |
| 403 | `forbidden` |
| 404, 405 | `route_not_served` |
| 413 | `request_too_large` |
| 429, 503, and 400 whose text begins with `503:` (Responses) | `worker_overloaded` |
| 504 | `worker_timeout` |
| other 5xx | `worker_failed` with that status and no reason, as that is told in the worker's own terms |
| a stream of status 200 whose first event is an error | what its status above says: an HTTP status and a body, no stream. `response.created` and `response.in_progress`, which a worker sends before it has looked at the request, are held back for up to 5 s and do not count as the first |
| 1xx, 3xx, anything else | `worker_protocol` |
| a body that is no JSON | the line of its status, with a general message |

## When an answer breaks off

Once some of an answer has reached the client, no other worker is tried. What the client sees then:

| answer | worker's error event | connection to the worker cut, or silent too long |
| --- | --- | --- |
| chat, completions: stream | passed, its message cleaned; `[DONE]` follows as the worker sends it | `data: {\"error\":{…,\"code\":\"broken_off\"}}`, no `[DONE]`, the connection ends without the last chunk |
| `/generate`: stream | passed, its message cleaned; `[DONE]` follows | `data: {\"error\":{…,\"code\":\"broken_off\"}}`, no `[DONE]`, likewise |
| Responses: stream | passed, its message cleaned | `event: error` with `\"code\":\"broken_off\"`, no `response.completed`, likewise |
| Messages: stream | passed, its message cleaned | `event: error` with `\"type\":\"api_error\"`, no `message_stop`, likewise |
| not a stream | – | tried elsewhere as long as it is held; one longer than `limits.response_observe_bytes` ends short of its last chunk |

On HTTP/2 the stream is reset where on HTTP/1.1 the connection ends. The part of an event that came before the cut is not sent.
`timeouts.total_s` ends an answer in the same way, without the last event if the client was not reading.

A filter that fails on the body of an answer and has `on_error = \"closed\"`, or holds more of it than it may, ends it too: with
`plugin_failed` as long as nothing has reached the client, else by cutting it, the last event (`plugin_failed`) seen by the
filters in front of it only. One that answers in the worker's place (`send_http_response`) is sent to the client in the first
case, and cuts the answer in the second, as in Envoy. The worker's part is aborted; nothing of it counts against the worker.

A page of another origin may read errors as it may read the answers of workers: a request with `Origin` is answered with
`access-control-allow-origin`.

## When to come back

`Retry-After` is in whole seconds. `queue_full`, `queue_timeout` and `worker_overloaded` say when the queue, as it stands, will
have drained, from the measured time between departures: 1 to 60, and 1 while none has been measured. A worker's own
`Retry-After` of up to an hour is passed on instead. `no_worker` says when workers are probed next
(`routing.probe_interval_ms`, at least 1). `draining`, `worker_unreachable`, `too_many_connections` and `session_busy` say 1:
another gateway, another worker or the end of the turn that runs may serve the next attempt at once.

## Filters

Once the filters have seen a request, they see its answer, whoever gives it: the gateway's refusals and workers' errors pass
`on_response_headers` and `on_response_body` in the shape that goes to the client, as local replies do in Envoy. A filter that
answers by itself is seen by itself and by the filters before it, and not by those behind it. An answer that takes the place of one
whose headers the filters have seen (a worker's that broke off while it was held, a filter's own to a response) is not shown
again. `on_log` and `on_done` run once for each request whose filters started, whatever became of it; without an answer (the
client left) there is no `response.code`.
";

/// The page.
pub fn page() -> String {
    let mut page = INTRODUCTION.to_owned();
    // Writing to a `String` cannot fail.
    let _ = table(&mut page);
    page.push_str(REST);
    page
}

fn table(page: &mut String) -> std::fmt::Result {
    writeln!(page, "\n| code | status | when | OpenAI type | Anthropic type | whose | `Retry-After` |")?;
    writeln!(page, "| --- | --- | --- | --- | --- | --- | --- |")?;
    for kind in Kind::ALL {
        let row = kind.row();
        let star = if kind.is_overload() { "*" } else { "" };
        writeln!(
            page,
            "| `{}` | {}{star} | {} | `{}` | `{}` | {} | {} |",
            row.code,
            row.status,
            kind.meaning(),
            row.openai,
            row.anthropic,
            row.blame.name(),
            if kind.says_when() { "yes" } else { "–" },
        )?;
    }
    writeln!(page, "\nOne refusal in each shape:\n")?;
    let refusal = Refusal::new(Kind::BadRequest, "nvext must be an object").with_param("nvext");
    for protocol in [Protocol::OpenAi, Protocol::Anthropic, Protocol::Native] {
        writeln!(page, "- {}: `{}`", protocol.name(), String::from_utf8_lossy(&refusal.body(protocol)))?;
    }
    Ok(())
}

// === impl Kind ===

impl Kind {
    /// When it happens, for the page.
    pub fn meaning(self) -> &'static str {
        match self {
            Kind::BadRequest => {
                "the body or a header is not what the route takes, or a field is refused (`docs/steering.md`)"
            }
            Kind::Unauthorized => "the admin listener wants its bearer token",
            Kind::NotFound => "no such path here",
            Kind::MethodNotAllowed => "the path is there, the method is not",
            Kind::ModelNotFound => "no pool serves the model",
            Kind::RequestTimeout => "head or body did not arrive in the time that the message names",
            Kind::TooLarge => "the body is over its limit, which the message names",
            Kind::HeaderTooLarge => "the headers are over a limit, which the message names",
            Kind::UriTooLong => "the request target is over `limits.uri_bytes`",
            Kind::UnsupportedEncoding => "a `Content-Encoding` that is not decoded; `Accept-Encoding` says which are",
            Kind::ExpectationFailed => "an `Expect` other than `100-continue`",
            Kind::TooManyConnections => "`limits.connections` are open on the listener",
            Kind::SessionBusy => "another turn of the same streaming session runs",
            Kind::QueueFull => "too many turns, or too many bytes, wait",
            Kind::QueueTimeout => "no worker had room in time",
            Kind::NoWorker => "no worker of the pool is ready",
            Kind::Draining => "the gateway is shutting down",
            Kind::Plugin => "a plugin with `on_error = \"closed\"` failed (also as the last event of a stream)",
            Kind::Upstream => "no worker could be reached, or the last one tried broke off before its answer",
            Kind::UpstreamTimeout => "the worker, or all of the request, took too long",
            Kind::UpstreamProtocol => "the worker's answer was none",
            Kind::BrokenOff => "the answer broke off (an event in the stream, never a status)",
            Kind::WorkerRefused => "the worker refused the request, for the reason in the message",
            Kind::ContextLength => "the prompt, or the prompt with the output asked for, is too long for the model",
            Kind::WorkerUnauthorized => "the worker does not know the client's credential",
            Kind::WorkerKey => "the worker does not take the key it has in the configuration",
            Kind::WorkerForbidden => "the worker forbids it to this credential",
            Kind::WorkerRoute => "the model's workers do not serve this route",
            Kind::WorkerTooLarge => "the worker takes no body of this size",
            Kind::WorkerOverloaded => "the workers that were tried are full",
            Kind::WorkerFailed => "the workers that were tried failed",
            Kind::ClientGone => "the client left first (in logs and metrics only)",
            Kind::Internal => {
                "a fault of the gateway: nothing that clients, workers or plugins do is known to bring it about"
            }
        }
    }

    /// Whether `admission.overload_status` gives its status.
    pub fn is_overload(self) -> bool {
        matches!(self, Kind::QueueFull | Kind::QueueTimeout | Kind::WorkerOverloaded)
    }

    /// Whether it says when to come back.
    pub fn says_when(self) -> bool {
        self.is_overload()
            || matches!(
                self,
                Kind::NoWorker | Kind::Draining | Kind::Upstream | Kind::SessionBusy | Kind::TooManyConnections
            )
    }
}

impl Blame {
    fn name(self) -> &'static str {
        match self {
            Blame::Client => "client",
            Blame::Worker => "worker",
            Blame::Gateway => "gateway",
            Blame::Load => "nobody: too much work",
        }
    }
}
