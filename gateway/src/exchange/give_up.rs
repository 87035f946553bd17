//! No worker is left to try: what the client is told.

use super::turn::left;
use super::{Connection, Exchange};
use crate::errors::{Kind, Refusal};
use crate::forward::AttemptFault;
use crate::forward::request::{Framing, for_client};
use bytes::Bytes;
use pingora_core::protocols::http::ServerSession;

/// Relays the last worker's own error, or says what happened.
pub(super) async fn give_up(
    exchange: &mut Exchange,
    client: &mut ServerSession,
    fault: AttemptFault,
) -> Result<Connection, Refusal> {
    let reason = fault.reason();
    let (head, body) = match fault {
        AttemptFault::Status { head, body, .. } => (head, body),
        AttemptFault::Event { head, seen, .. } => (head, Bytes::from(seen.concat())),
        AttemptFault::Timeout(_) | AttemptFault::Connect { timeout: true, .. } => {
            tracing::warn!(%reason, "no worker answered in time");
            return Err(Refusal::new(Kind::UpstreamTimeout, "the worker did not answer in time"));
        }
        AttemptFault::Connect { .. } | AttemptFault::Broken { .. } => {
            // The reason names the worker's address, which is not for clients.
            tracing::warn!(%reason, "no worker could be reached");
            return Err(Refusal::new(Kind::Upstream, "no worker could be reached").with_retry_after(1));
        }
        AttemptFault::ClientGone => return Err(left()),
    };
    let framing = Framing::of(client.req_header().version);
    let gone = |_| left();
    let mut answer = for_client(&head, &exchange.record.request_id, framing, false).map_err(gone)?;
    answer.remove_header(&http::header::TRANSFER_ENCODING);
    answer.insert_header(http::header::CONTENT_LENGTH, body.len().to_string()).map_err(gone)?;
    if matches!(answer.status.as_u16(), 429 | 503) && !answer.headers.contains_key("retry-after") {
        answer.insert_header("retry-after", "1").map_err(gone)?;
    }
    exchange.record.status = answer.status.as_u16();
    exchange.record.end = "worker_error";
    client.write_response_header(Box::new(answer)).await.map_err(gone)?;
    client.write_response_body(body, true).await.map_err(gone)?;
    Ok(Connection::Keep)
}
