//! The measure of all: a plain pingora proxy, one thread, nothing but `upstream_peer`.

use crate::process::wait_for_parent;
use async_trait::async_trait;
use pingora_core::server::Server;
use pingora_core::server::configuration::ServerConf;
use pingora_core::upstreams::peer::HttpPeer;
use pingora_proxy::{ProxyHttp, Session, http_proxy_service};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};

struct Plain {
    upstreams: Vec<SocketAddr>,
    next: AtomicUsize,
}

#[async_trait]
impl ProxyHttp for Plain {
    type CTX = ();

    fn new_ctx(&self) -> Self::CTX {}

    async fn upstream_peer(&self, _session: &mut Session, _ctx: &mut Self::CTX) -> pingora_core::Result<Box<HttpPeer>> {
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        match self.upstreams.get(turn % self.upstreams.len().max(1)) {
            Some(address) => Ok(Box::new(HttpPeer::new(*address, false, String::new()))),
            None => pingora_core::Error::e_explain(pingora_core::ErrorType::ConnectNoRoute, "no upstream"),
        }
    }
}

/// Serves at `address` until the parent is gone.
pub fn run(address: SocketAddr, upstreams: Vec<SocketAddr>) {
    let conf = ServerConf { threads: 1, ..ServerConf::default() };
    let mut server = Server::new_with_opt_and_conf(None, conf);
    server.bootstrap();
    let mut service = http_proxy_service(&server.configuration, Plain { upstreams, next: AtomicUsize::new(0) });
    service.add_tcp(&address.to_string());
    server.add_service(service);
    std::thread::spawn(move || server.run_forever());
    println!("{address}");
    wait_for_parent();
}
