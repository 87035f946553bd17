//! The edge: pingora's hooks, which only hand over to [`crate::exchange`].

use crate::exchange::{self, Connection};
use crate::gateway::Gateway;
use async_trait::async_trait;
use pingora_core::ErrorType::InternalError;
use pingora_core::upstreams::peer::HttpPeer;
use pingora_core::{Error, Result};
use pingora_proxy::{FailToProxy, ProxyHttp, Session};
use std::sync::Arc;

/// The proxy application.
pub struct Edge {
    gateway: Arc<Gateway>,
}

impl Edge {
    /// Hands requests to `gateway`.
    pub fn new(gateway: Arc<Gateway>) -> Self {
        Self { gateway }
    }
}

#[async_trait]
impl ProxyHttp for Edge {
    type CTX = ();

    fn new_ctx(&self) -> Self::CTX {}

    /// Serves the request whole: every route is answered here, by our own forwarding leg or by the gateway itself.
    async fn request_filter(&self, session: &mut Session, _ctx: &mut Self::CTX) -> Result<bool> {
        match exchange::serve(&self.gateway, session.as_downstream_mut()).await {
            Connection::Keep => Ok(true),
            Connection::Cut => Error::e_explain(InternalError, "the answer broke off"),
        }
    }

    async fn upstream_peer(&self, _session: &mut Session, _ctx: &mut Self::CTX) -> Result<Box<HttpPeer>> {
        Error::e_explain(InternalError, "no request takes pingora's own leg")
    }

    /// Nothing is written here: whoever cut the answer has said all there was to say.
    async fn fail_to_proxy(&self, _session: &mut Session, _error: &Error, _ctx: &mut Self::CTX) -> FailToProxy {
        FailToProxy { error_code: 0, can_reuse_downstream: false }
    }

    fn suppress_error_log(&self, _session: &Session, _ctx: &Self::CTX, _error: &Error) -> bool {
        true
    }
}
