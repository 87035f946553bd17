//! One request, from its head to its end. The stages stand in the order in which a request meets them.

mod attempt;
mod filtering;
mod give_up;
mod local;
mod record;
mod reply;
mod retries;
mod session_turn;
mod turn;

pub use record::Record;
use reply::Reply;

use crate::clock::unix_ms;
use crate::edge::head;
use crate::errors::{Kind, Refusal};
use crate::filters::FilterRun;
use crate::gateway::Gateway;
use crate::generation::Generation;
use crate::higress::wanted;
use crate::policy::events::ms_since;
use crate::recording::Draft;
use crate::{request_body, request_id};
use http::Method;
use pingora_core::protocols::http::ServerSession;
use std::sync::Arc;
use std::time::Instant;
use turnstile_fleet::route::{Protocol, Route};

/// How an exchange left the client's connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Connection {
    /// The answer is whole; another request may follow.
    Keep,
    /// The answer is whole, and the last: what else the client sends is not for us to understand.
    Close,
    /// The answer broke off or never began: the connection has to end.
    Cut,
}

/// What all stages of one request share.
pub struct Exchange {
    /// The generation it began with.
    pub generation: Arc<Generation>,
    /// Its record.
    pub record: Record,
    /// When its head was there.
    pub arrived: Instant,
    /// It may see how it was decided.
    pub explain: bool,
    /// The filters that have begun to see it.
    pub filters: Option<FilterRun>,
    /// What is recorded of it at its end, if turns are recorded.
    pub draft: Option<Box<Draft>>,
}

/// Serves one request.
pub async fn serve(gateway: &Arc<Gateway>, client: &mut ServerSession) -> Connection {
    // Whoever is behind this gateway takes these from its plugins only.
    wanted::strip_request(client.req_header_mut());
    let generation = gateway.generation.load_full();
    let arrived = Instant::now();
    let head = client.req_header();
    let own_id = generation.config.logging.accept_request_id.then(|| client.get_header("x-request-id")).flatten();
    let request_id = request_id::choose(own_id.map(|v| v.as_bytes()));
    let path = head.uri.path();
    let route = Route::from_path(path);
    let explain = generation.config.logging.explain_headers
        && client.get_header("x-turnstile-explain").is_some_and(|v| v.as_bytes() == b"1");
    let label = route.map_or("local", Route::name);
    let mut exchange = Exchange {
        record: Record {
            ts: unix_ms(),
            request_id,
            generation: generation.number,
            route: label,
            end: "refused",
            ..Record::default()
        },
        generation,
        arrived,
        explain,
        filters: None,
        draft: None,
    };
    last_answer_if_stopping(gateway, client);
    let checked = head::check(client, &exchange.generation.config.limits);
    let asks = checked.is_ok() && client.req_header().method == Method::OPTIONS;
    let Some(route) = route.filter(|_| !asks) else {
        return Box::pin(local::serve(gateway, client, &exchange.record.request_id, checked)).await;
    };

    gateway.metrics.in_progress.with_label_values(&[label]).inc();
    let progress = InProgress { gateway: Arc::clone(gateway), label };
    let served = match checked.and_then(|()| check(client)) {
        // On the heap: the state of a turn is large, and it is handed on a few times before it begins.
        Ok(()) => match gateway.stopping.run(Box::pin(turn::serve(gateway, client, route, &mut exchange))).await {
            Ok(served) => served,
            Err(cut) if client.response_written().is_none() => Err(cut.refusal()),
            Err(_) => {
                exchange.record.end = "shutdown";
                Ok(Connection::Cut)
            }
        },
        Err(refusal) => Err(refusal),
    };
    let connection = match served {
        Ok(connection) => connection,
        Err(refusal) => Box::pin(refuse(gateway, client, route.protocol(), refusal, &mut exchange)).await,
    };
    drop(progress);
    // Whatever became of it, and after the client has its answer.
    if let Some(mut filters) = exchange.filters.take() {
        if !exchange.generation.events.is_empty() {
            filters.end(&exchange.record.ended(ms_since(arrived)));
        }
        filters.finish();
    }
    finish(gateway, &mut exchange);
    connection
}

/// What can be refused before the body is read.
fn check(client: &ServerSession) -> Result<(), Refusal> {
    let head = client.req_header();
    if head.method != Method::POST {
        let refusal = Refusal::new(Kind::MethodNotAllowed, format!("{} takes POST only", head.uri.path()));
        return Err(refusal.with_header("allow", local::INFERENCE_METHODS));
    }
    Ok(())
}

/// A gateway that stops says so with every answer: the client's next request comes by another connection.
fn last_answer_if_stopping(gateway: &Gateway, client: &mut ServerSession) {
    if gateway.is_stopping() {
        client.set_keepalive(None);
    }
}

async fn refuse(
    gateway: &Gateway,
    client: &mut ServerSession,
    protocol: Protocol,
    refusal: Refusal,
    exchange: &mut Exchange,
) -> Connection {
    last_answer_if_stopping(gateway, client);
    let code = refusal.kind.row().code;
    if !refusal.kind.is_workers() {
        gateway.metrics.refusals.with_label_values(&[code]).inc();
        if let Some(filters) = &mut exchange.filters {
            filters.answers_locally(code);
        }
    }
    exchange.record.status = refusal.status();
    exchange.record.error = Some(code);
    if refusal.kind == Kind::ClientGone {
        exchange.record.end = "client_gone";
        return Connection::Cut;
    }
    // A body that was not read to its end makes the connection useless.
    let close = refusal.closes || !request_body::is_read(client);
    let sent = match Reply::refusal(&refusal, protocol).and_then(|reply| reply.readable_by(client)) {
        Ok(reply) => reply.send(client, exchange, protocol, close).await,
        Err(error) => Err(error),
    };
    sent.unwrap_or(Connection::Cut)
}

fn finish(gateway: &Gateway, exchange: &mut Exchange) {
    let record = &mut exchange.record;
    let elapsed = exchange.arrived.elapsed();
    record.total_ms = elapsed.as_secs_f64() * 1e3;
    let pool = record.pool.as_deref().unwrap_or("");
    let status = status_label(record.status);
    gateway.metrics.requests.with_label_values(&[record.route, pool, status]).inc();
    gateway.metrics.duration.with_label_values(&[record.route, pool]).observe(elapsed.as_secs_f64());
    if let Some(ttft) = record.ttft_ms {
        gateway.metrics.ttft.with_label_values(&[record.route, pool]).observe(ttft / 1e3);
    }
    if gateway.log.is_on() {
        gateway.log.line(record.line());
    }
    if let (Some(recording), Some(draft)) = (&gateway.recording, exchange.draft.take()) {
        recording.fleet(unix_ms(), &exchange.generation, || gateway.fleet.workers.current());
        recording.turn(draft, record);
    }
}

/// Statuses as labels: a worker may answer any number, a metric may not.
fn status_label(status: u16) -> &'static str {
    match status {
        200 => "200",
        400 => "400",
        401 => "401",
        403 => "403",
        404 => "404",
        405 => "405",
        408 => "408",
        409 => "409",
        413 => "413",
        414 => "414",
        415 => "415",
        417 => "417",
        429 => "429",
        431 => "431",
        499 => "499",
        500 => "500",
        502 => "502",
        503 => "503",
        504 => "504",
        201..=299 => "2xx",
        300..=399 => "3xx",
        402..=499 => "4xx",
        501..=599 => "5xx",
        _ => "other",
    }
}

struct InProgress {
    gateway: Arc<Gateway>,
    label: &'static str,
}

impl Drop for InProgress {
    fn drop(&mut self) {
        self.gateway.metrics.in_progress.with_label_values(&[self.label]).dec();
    }
}
