//! Answers that no worker gave, on their way to the client: refusals, and what plugins answer. Filters that have seen the
//! request see them like any other answer.

use super::{Connection, Exchange};
use crate::errors::{Kind, Refusal};
use crate::filters::FilterVerdict;
use crate::forward::client_gone;
use crate::headers::is_hop_by_hop;
use bytes::Bytes;
use http::header;
use pingora_core::protocols::http::ServerSession;
use pingora_http::ResponseHeader;
use turnstile_fleet::route::Protocol;
use turnstile_plugins::LocalResponse;

/// A whole answer.
pub(super) struct Reply {
    head: ResponseHeader,
    body: Bytes,
}

// === impl Reply ===

impl Reply {
    /// A refusal in the shape of `protocol`.
    pub fn refusal(refusal: &Refusal, protocol: Protocol) -> pingora_core::Result<Self> {
        let mut head = ResponseHeader::build(refusal.status(), Some(4))?;
        head.insert_header(header::CONTENT_TYPE, "application/json")?;
        if let Some(seconds) = refusal.retry_after_s {
            head.insert_header(header::RETRY_AFTER, seconds.to_string())?;
        }
        if let Some((name, value)) = refusal.header {
            head.insert_header(name, value)?;
        }
        Ok(Self { head, body: refusal.body(protocol) })
    }

    /// Lets a page of another origin read it, as it may read the answers of workers.
    pub fn readable_by(mut self, client: &ServerSession) -> pingora_core::Result<Self> {
        if let Some(origin) = client.get_header(header::ORIGIN).cloned() {
            self.head.insert_header(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin)?;
            self.head.insert_header(header::ACCESS_CONTROL_ALLOW_CREDENTIALS, "true")?;
            self.head.insert_header(header::VARY, "Origin")?;
        }
        Ok(self)
    }

    /// What a plugin answers. A body of which it does not say the type is text, as on other hosts.
    pub fn plugin(response: &LocalResponse) -> pingora_core::Result<Self> {
        let mut head = ResponseHeader::build(response.status, Some(response.headers.len() + 2))?;
        for (name, value) in &response.headers {
            // The connection, and with it the framing, is the gateway's.
            if *name != header::CONTENT_LENGTH && !is_hop_by_hop(name, &[]) {
                head.append_header(name.clone(), value.clone())?;
            }
        }
        if !response.body.is_empty() && !head.headers.contains_key(header::CONTENT_TYPE) {
            head.insert_header(header::CONTENT_TYPE, "text/plain")?;
        }
        Ok(Self { head, body: response.body.clone() })
    }

    /// Shows it to the filters, unless they have seen the head of an answer already, and writes it. With `close` the
    /// connection ends behind it.
    ///
    /// # Errors
    /// When the client cannot be written to.
    pub async fn send(
        mut self,
        client: &mut ServerSession,
        exchange: &mut Exchange,
        protocol: Protocol,
        close: bool,
    ) -> pingora_core::Result<Connection> {
        if let Some(filters) = exchange.filters.as_mut() {
            if filters.takes_answer() {
                let gone = client_gone(client);
                let mut verdict = filters.response_headers(&mut self.head, self.body.is_empty(), gone).await;
                if matches!(verdict, FilterVerdict::Go) && !self.body.is_empty() {
                    match filters.local_body(self.body.clone()).await {
                        Ok(body) => {
                            self.body = body;
                            if let Some(head) = filters.changed_response_head() {
                                self.head = head;
                            }
                        }
                        Err(stop) => verdict = stop.into(),
                    }
                }
                match verdict {
                    FilterVerdict::Go => {}
                    FilterVerdict::Answer(response) => {
                        filters.answers_locally(response.details.clone());
                        self = Self::plugin(&response)?;
                    }
                    FilterVerdict::Failed(refusal) if refusal.kind == Kind::ClientGone => return Ok(Connection::Cut),
                    FilterVerdict::Failed(refusal) => {
                        filters.answers_locally(refusal.kind.row().code);
                        self = Self::refusal(&refusal, protocol)?.readable_by(client)?;
                    }
                    FilterVerdict::Close => {
                        exchange.record.end = "plugin_close";
                        return Ok(Connection::Cut);
                    }
                }
            }
            filters.answered(&self.head);
        }
        let Self { mut head, body } = self;
        exchange.record.status = head.status.as_u16();
        // These have no body, whatever a plugin gave them.
        let bodiless = matches!(head.status.as_u16(), 204 | 304);
        let body = if bodiless { Bytes::new() } else { body };
        if !bodiless {
            head.insert_header(header::CONTENT_LENGTH, body.len().to_string())?;
        }
        head.insert_header("x-request-id", exchange.record.request_id.as_str())?;
        if close {
            client.set_keepalive(None);
            client.set_close_on_response_before_downstream_finish(true);
        }
        client.write_response_header(Box::new(head)).await?;
        client.write_response_body(body, true).await?;
        Ok(if close { Connection::Close } else { Connection::Keep })
    }
}
