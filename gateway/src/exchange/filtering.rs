//! The filters on a turn's way: before it is understood, and when they end it.

use super::turn::answer;
use super::{Connection, Exchange};
use crate::errors::Refusal;
use crate::filters::{FilterRun, FilterVerdict};
use crate::request_body::{self, BodyLimits, Held};
use bytes::Bytes;
use pingora_core::protocols::http::ServerSession;
use turnstile_fleet::route::Protocol;

/// The request's head and body on their way through the filters: what is left of the body.
pub(super) async fn through_filters(
    run: &mut FilterRun,
    client: &mut ServerSession,
    limits: BodyLimits,
    held: &mut Held,
) -> Result<Bytes, FilterVerdict> {
    let bodiless = request_body::is_empty(client);
    match run.request_headers(client, bodiless).await {
        FilterVerdict::Go if bodiless => Ok(Bytes::new()),
        FilterVerdict::Go => run.request_body(client, limits, held).await,
        verdict => Err(verdict),
    }
}

/// What becomes of an exchange that does not go on because of its filters.
pub(super) async fn ended_by_filter(
    client: &mut ServerSession,
    exchange: &mut Exchange,
    verdict: FilterVerdict,
    protocol: Protocol,
) -> Result<Connection, Refusal> {
    if !matches!(verdict, FilterVerdict::Close) {
        request_body::drain(client).await;
    }
    match verdict {
        FilterVerdict::Answer(response) => answer(client, exchange, &response, protocol).await,
        FilterVerdict::Failed(refusal) => Err(refusal),
        FilterVerdict::Close | FilterVerdict::Go => {
            exchange.record.end = "plugin_close";
            Ok(Connection::Cut)
        }
    }
}
