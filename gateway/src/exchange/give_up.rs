//! No worker is left to try, or the last one broke off: what the client is told.

use super::Exchange;
use super::turn::left;
use crate::clock::now_ms;
use crate::errors::{Kind, Refusal};
use crate::forward::AttemptFault;
use crate::forward::relay::{Ending, ResponseFilter, Stop};
use crate::gateway::Gateway;
use bytes::Bytes;
use http::{HeaderMap, Version, header};
use pingora_core::protocols::http::ServerSession;
use std::time::Duration;
use turnstile_fleet::complaint::{self, Cause, Complaint};
use turnstile_fleet::route::Protocol;

/// Longest `Retry-After` of a worker that is passed on, in seconds.
const LONGEST_RETRY_AFTER_S: u32 = 3600;

/// How long the last words of a broken stream may take: the client may not be reading.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// How long an HTTP/2 connection is given to write them before its stream is reset. They may come too late for a client that is
/// slow: the reset itself tells that the answer broke off.
const UNTIL_WRITTEN: Duration = Duration::from_millis(20);

/// What the fault of the last attempt means for the client.
pub(super) fn refusal(gateway: &Gateway, exchange: &mut Exchange, fault: AttemptFault) -> Refusal {
    let reason = fault.reason();
    let (complaint, headers) = match fault {
        AttemptFault::Status { status, head, body } => {
            let words = with_secrets(gateway, exchange, |secrets| complaint::from_answer(status, &body, secrets));
            (words, Some(head.headers.clone()))
        }
        AttemptFault::Event { status, message, .. } => {
            (with_secrets(gateway, exchange, |secrets| complaint::from_event(status, &message, secrets)), None)
        }
        AttemptFault::Timeout(_) | AttemptFault::Stuck | AttemptFault::Connect { timeout: true, .. } => {
            tracing::warn!(%reason, "no worker answered in time");
            return Refusal::new(Kind::UpstreamTimeout, "the worker did not answer in time");
        }
        AttemptFault::Connect { .. } | AttemptFault::Broken { .. } => {
            // The reason names the worker's address, which is not for clients.
            tracing::warn!(%reason, "no worker could be reached");
            return Refusal::new(Kind::Upstream, "no worker could be reached").with_retry_after(1);
        }
        AttemptFault::Protocol(_) => {
            tracing::warn!(%reason, "no worker answered in HTTP that can be relayed");
            let message = "the worker's answer was not one that can be relayed";
            return Refusal::new(Kind::UpstreamProtocol, message).with_retry_after(1);
        }
        AttemptFault::ClientGone => return left(),
    };
    exchange.record.end = "worker_error";
    from_complaint(gateway, exchange, complaint, headers.as_ref())
}

/// No worker of the pool is ready. They are asked again at the next probe.
pub(super) fn no_worker(exchange: &Exchange) -> Refusal {
    let probes = exchange.generation.config.routing.probe_interval_ms.div_ceil(1_000).max(1);
    let seconds = u32::try_from(probes).unwrap_or(u32::MAX);
    Refusal::new(Kind::NoWorker, "no worker is ready").with_retry_after(seconds)
}

/// Runs `read` with what must not be told: the engine's name of the request, the worker's name and address.
fn with_secrets(gateway: &Gateway, exchange: &Exchange, read: impl FnOnce(&[&str]) -> Complaint) -> Complaint {
    let record = &exchange.record;
    let target = worker_target(gateway, exchange);
    let address = target.as_ref().and_then(|t| t.authority.to_str().ok()).unwrap_or_default();
    let host = address.rsplit_once(':').map_or("", |(host, _)| host);
    read(&[record.rid.as_deref().unwrap_or_default(), address, host, record.worker.as_deref().unwrap_or_default()])
}

fn worker_target(gateway: &Gateway, exchange: &Exchange) -> Option<std::sync::Arc<crate::upstream::Target>> {
    gateway.fleet.workers.by_id(exchange.record.worker.as_deref()?)?.target()
}

/// The line of the table for what a worker said.
fn from_complaint(
    gateway: &Gateway,
    exchange: &Exchange,
    complaint: Complaint,
    headers: Option<&HeaderMap>,
) -> Refusal {
    let Complaint { status, message, param, cause } = complaint;
    let said = |general: &str| message.clone().unwrap_or_else(|| general.to_owned());
    let refusal = match (status, cause) {
        (_, Cause::ContextLength) => Refusal::new(Kind::ContextLength, said("the prompt is too long for the model")),
        (401, _) if worker_target(gateway, exchange).is_some_and(|t| t.authorization.is_some()) => {
            tracing::error!(worker = exchange.record.worker.as_deref(), "the worker refuses the key in its api_key");
            return Refusal::new(Kind::WorkerKey, "the worker refuses the gateway");
        }
        (401, _) => Refusal::new(Kind::WorkerUnauthorized, "the worker does not know this credential"),
        (403, _) => Refusal::new(Kind::WorkerForbidden, said("the worker forbids this")),
        (404 | 405, _) => Refusal::new(Kind::WorkerRoute, said("the model's workers do not serve this route")),
        (413, _) => Refusal::new(Kind::WorkerTooLarge, said("the worker takes no body of this size")),
        (429 | 503, _) => {
            let status = exchange.generation.config.admission.overload_status.code();
            let drained = || gateway.fleet.admission.retry_after_s(now_ms());
            let seconds = headers.and_then(told_when).unwrap_or_else(drained);
            Refusal::new(Kind::WorkerOverloaded, said("the worker is overloaded"))
                .with_status(status)
                .with_retry_after(seconds)
        }
        (504, _) => Refusal::new(Kind::UpstreamTimeout, "the worker did not answer in time"),
        (400..500, _) => Refusal::new(Kind::WorkerRefused, said("the worker refused the request")).with_status(status),
        _ => Refusal::new(Kind::WorkerFailed, "the worker failed to serve the request").with_status(status),
    };
    match param {
        Some(param) => refusal.with_param(param),
        None => refusal,
    }
}

/// A worker's own `Retry-After`, where it is a number of seconds that makes sense.
fn told_when(headers: &HeaderMap) -> Option<u32> {
    let seconds: u32 = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    (1..=LONGEST_RETRY_AFTER_S).contains(&seconds).then_some(seconds)
}

/// Tells a client in the stream itself that it broke off, since many look at nothing else. The connection ends behind it
/// short of its last chunk all the same.
pub(super) async fn tell_broken(
    client: &mut ServerSession,
    protocol: Protocol,
    ending: &Ending,
    filter: &mut Option<Box<dyn ResponseFilter + '_>>,
) {
    let (kind, why) = match ending {
        Ending::Timeout(_) => (Kind::BrokenOff, "it took too long"),
        Ending::Filter(Stop::Failed(words)) => (Kind::Plugin, words.as_str()),
        Ending::Filter(Stop::Answers(_) | Stop::Closes) => (Kind::BrokenOff, "a filter ended it"),
        _ => (Kind::BrokenOff, "the connection to the worker was lost"),
    };
    let event = Refusal::new(kind, format!("the answer broke off: {why}")).event(protocol);
    let event: Bytes = match filter {
        // Without a filter that has to see it, it may not pass.
        Some(filter) => match tokio::time::timeout(LAST_WORDS, filter.chunk(event, true)).await {
            Ok(event) => event.unwrap_or_default(),
            Err(_) => Bytes::new(),
        },
        None => event,
    };
    if !event.is_empty() {
        // A client that cannot be written to sees the end of the connection.
        let _ = tokio::time::timeout(LAST_WORDS, client.write_response_body(event, false)).await;
        if client.req_header().version == Version::HTTP_2 {
            // A reset takes back what its connection has not written yet.
            tokio::time::sleep(UNTIL_WRITTEN).await;
        }
    }
}
