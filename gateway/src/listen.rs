//! Accept loops. The sockets are bound by the gateway itself, so that port 0 works and the real address is known; every
//! accepted connection is handed to a pingora application.

use crate::client_stream::ClientStream;
use parking_lot::Mutex;
use pingora_core::apps::ServerApp;
use pingora_core::protocols::Stream;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

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

    /// Accepts until `shutdown` turns true; then waits for the open connections at most `grace`.
    pub async fn serve<A>(self, app: Arc<A>, shutdown: watch::Receiver<bool>, grace: Arc<Mutex<Duration>>)
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
                        let _ = socket.set_nodelay(true);
                        let app = Arc::clone(&app);
                        let watch = shutdown.clone();
                        connections.spawn(async move {
                            let stream: Stream = Box::new(ClientStream::new(socket, peer));
                            app.process_new(stream, &watch).await;
                        });
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
        drop(self.listener);
        app.cleanup().await;
        let grace = *grace.lock();
        let all = async { while connections.join_next().await.is_some() {} };
        if tokio::time::timeout(grace, all).await.is_err() {
            tracing::info!(listener = %self.address, open = connections.len(), "grace time over, cutting connections");
            connections.abort_all();
        }
    }
}

async fn stopped(signal: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone, which is a stop as well.
    let _ = signal.wait_for(|stop| *stop).await;
}
