//! The port of a worker, which stays its own while nobody listens.

use std::{io, net::SocketAddr};
use tokio::net::{TcpListener, TcpSocket};

/// Connections that the kernel accepts ahead.
const BACKLOG: u32 = 1024;

/// An address that is listened on, or refuses connections.
pub(crate) struct Port {
    addr: SocketAddr,
    state: State,
}

enum State {
    Open(TcpListener),
    /// Bound, so that nobody else gets it; connections are refused.
    Held(TcpSocket),
    /// Neither: the last change failed.
    Lost,
}

fn bound(addr: SocketAddr) -> io::Result<TcpSocket> {
    let socket = if addr.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    Ok(socket)
}

impl Port {
    /// Takes an address; port 0 picks a free one.
    pub(crate) fn take(addr: SocketAddr) -> io::Result<Self> {
        let socket = bound(addr)?;
        Ok(Self { addr: socket.local_addr()?, state: State::Held(socket) })
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Listens from now on.
    pub(crate) fn listen(&mut self) -> io::Result<()> {
        self.state = match std::mem::replace(&mut self.state, State::Lost) {
            State::Open(listener) => State::Open(listener),
            State::Held(socket) => State::Open(socket.listen(BACKLOG)?),
            State::Lost => State::Open(bound(self.addr)?.listen(BACKLOG)?),
        };
        Ok(())
    }

    /// Refuses connections from now on.
    pub(crate) fn hold(&mut self) -> io::Result<()> {
        // The listener has to go before the address can be bound again.
        if !matches!(self.state, State::Held(_)) {
            self.state = State::Lost;
            self.state = State::Held(bound(self.addr)?);
        }
        Ok(())
    }

    /// The next connection; waits for ever while none can come.
    pub(crate) async fn accept(&self) -> io::Result<tokio::net::TcpStream> {
        match &self.state {
            State::Open(listener) => listener.accept().await.map(|(stream, _)| stream),
            State::Held(_) | State::Lost => std::future::pending().await,
        }
    }
}
