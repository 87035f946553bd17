//! Accept loops. The sockets are bound by the gateway itself, so that port 0 works and the real address is known; every
//! accepted connection is handed to a pingora application.

use crate::client_stream::ClientStream;
use futures::FutureExt;
use pingora_core::apps::ServerApp;
use pingora_core::protocols::Stream;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// A bound socket with the address it got.
pub struct Bound {
    listener: TcpListener,
    address: SocketAddr,
}

impl Bound {
    /// Binds `address` (`host:port`; port 0 takes any free one).
    ///
    /// # Errors
    /// What the system says, with the address.
    pub async fn bind(address: &str) -> std::io::Result<Self> {
        let listener = TcpListener::bind(address)
            .await
            .map_err(|e| std::io::Error::new(e.kind(), format!("cannot listen on {address}: {e}")))?;
        let address = listener.local_addr()?;
        Ok(Self { listener, address })
    }

    /// The address bound.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Accepts until `shutdown` turns true; then waits for the open connections until they are to be `cut`.
    pub async fn serve<A>(self, app: Arc<A>, shutdown: watch::Receiver<bool>, cut: CancellationToken)
    where
        A: ServerApp + Send + Sync + 'static,
    {
        let mut connections = JoinSet::new();
        let mut stop = shutdown.clone();
        loop {
            tokio::select! {
                biased;
                () = stopped(&mut stop) => break,
                accepted = self.listener.accept() => match accepted {
                    Ok((socket, peer)) => {
                        connections.spawn(connection(socket, peer, Arc::clone(&app), shutdown.clone()));
                    }
                    Err(error) => {
                        // Out of descriptors, or the client left before accept: neither ends the listener.
                        tracing::warn!(%error, listener = %self.address, "accept failed");
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    }
                },
                Some(_) = connections.join_next() => {}
            }
        }
        // Who has connected already, as far as it can tell, is served.
        while let Some(Ok((socket, peer))) = self.listener.accept().now_or_never() {
            connections.spawn(connection(socket, peer, Arc::clone(&app), shutdown.clone()));
        }
        drop(self.listener);
        app.cleanup().await;
        let all = async { while connections.join_next().await.is_some() {} };
        tokio::select! {
            () = all => {}
            () = cut.cancelled() => {}
        }
        if !connections.is_empty() {
            tracing::info!(listener = %self.address, open = connections.len(), "cutting connections");
            connections.shutdown().await;
        }
    }
}

async fn connection<A>(socket: TcpStream, peer: SocketAddr, app: Arc<A>, shutdown: watch::Receiver<bool>)
where
    A: ServerApp + Send + Sync + 'static,
{
    let _ = socket.set_nodelay(true);
    let stream: Stream = Box::new(ClientStream::new(socket, peer));
    app.process_new(stream, &shutdown).await;
}

async fn stopped(signal: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone, which is a stop as well.
    let _ = signal.wait_for(|stop| *stop).await;
}
