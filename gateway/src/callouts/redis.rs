//! Redis calls. Each goes over a connection that it has for itself until its reply is there; connections are kept between
//! calls, apart for each plugin, upstream and login.

use super::Callouts;
use super::destination::{IDLE, resolve};
use bytes::{Bytes, BytesMut};
use combine::parser::combinator::AnySendSyncPartialState;
use combine::stream::{Decoder, PointerOffset};
use hashbrown::HashMap;
use parking_lot::Mutex;
use redis::{Value, cmd, parse_redis_value_async};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use turnstile_config::{NamedUpstream, Secret};
use turnstile_plugins::{RedisCallout, RedisLogin};

/// Connections that a plugin may have to one server as one user; more calls wait.
const MAX_CONNECTIONS: usize = 8;
/// Servers and users that connections of one plugin may be kept for: it can state a new user with every call.
const MAX_POOLS: usize = 32;
/// Longest reply to what sets a connection up, bytes.
const MAX_GREETING: usize = 4096;

/// The connections of a process.
#[derive(Default)]
pub(super) struct RedisConnections {
    pools: Mutex<HashMap<Key, Arc<Pool>>>,
}

/// Whose connections they are. A password that the plugin states is part of it: another one is another login.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    plugin: Arc<str>,
    upstream: String,
    url: String,
    login: RedisLogin,
}

struct Pool {
    places: Arc<Semaphore>,
    idle: Mutex<Vec<Connection>>,
}

/// One connection, with no call on it.
struct Connection {
    stream: TcpStream,
    decoder: Decoder<AnySendSyncPartialState, PointerOffset<[u8]>>,
    used: Instant,
}

/// Keeps what is read, up to a bound.
struct Recorder<'a> {
    stream: &'a mut TcpStream,
    raw: BytesMut,
    most: usize,
}

// === impl RedisConnections ===

impl RedisConnections {
    /// Closes connections that have waited too long, and forgets who has none.
    pub(super) fn sweep(&self) {
        self.pools.lock().retain(|_, pool| {
            let mut idle = pool.idle.lock();
            idle.retain(|connection| connection.used.elapsed() < IDLE);
            !idle.is_empty() || pool.places.available_permits() < MAX_CONNECTIONS
        });
    }

    fn pool(&self, key: Key) -> Result<Arc<Pool>, String> {
        let mut pools = self.pools.lock();
        if !pools.contains_key(&key) && pools.keys().filter(|other| other.plugin == key.plugin).count() >= MAX_POOLS {
            return Err(format!("connections for {MAX_POOLS} servers and users are kept already"));
        }
        Ok(Arc::clone(pools.entry(key).or_insert_with(|| {
            Arc::new(Pool { places: Arc::new(Semaphore::new(MAX_CONNECTIONS)), idle: Mutex::default() })
        })))
    }
}

/// Makes a call: its reply as it came, in RESP.
///
/// # Errors
/// In a few words why there is none.
pub(super) async fn call(
    callouts: &Callouts,
    plugin: &Arc<str>,
    upstream: &NamedUpstream,
    callout: RedisCallout,
) -> Result<Bytes, String> {
    let most = Duration::from_millis(upstream.timeout_ms);
    let limit = callout.timeout.map_or(most, |timeout| timeout.min(most));
    let exchange = exchange(&callouts.redis, plugin, upstream, callout);
    match tokio::time::timeout(limit, exchange).await {
        Ok(reply) => reply,
        Err(_) => Err(format!("no reply within {limit:?}")),
    }
}

async fn exchange(
    connections: &RedisConnections,
    plugin: &Arc<str>,
    upstream: &NamedUpstream,
    callout: RedisCallout,
) -> Result<Bytes, String> {
    let login = login(upstream, callout.login);
    let key = Key {
        plugin: Arc::clone(plugin),
        upstream: upstream.name.clone(),
        url: upstream.url.to_string(),
        login: login.clone(),
    };
    let pool = connections.pool(key)?;
    let place: Result<OwnedSemaphorePermit, _> = Arc::clone(&pool.places).acquire_owned().await;
    let _place = place.map_err(|_| "connections are closed")?;
    let mut connection = match pool.take() {
        Some(connection) => connection,
        None => Connection::open(upstream, &login).await?,
    };
    // A connection whose call is given up is not put back: its reply would be the next call's.
    let (reply, value) = connection.ask(&packed(&callout.command), callout.max_reply).await?;
    // A connection without its login is of no use to the next call either: that one logs in with what is configured then.
    if !matches!(&value, Value::ServerError(error) if error.code() == "NOAUTH") {
        connection.used = Instant::now();
        pool.idle.lock().push(connection);
    }
    Ok(reply)
}

/// What the upstream states holds; what it leaves open, the plugin may state. Its password is read when a connection is made.
fn login(upstream: &NamedUpstream, wanted: RedisLogin) -> RedisLogin {
    let stated = upstream.username.is_some() || upstream.password.is_some();
    let database = upstream.url.database().or(wanted.database);
    if !stated {
        return RedisLogin { database, ..wanted };
    }
    RedisLogin { username: upstream.username.clone(), password: None, database }
}

fn packed(words: &[Bytes]) -> Vec<u8> {
    let mut command = redis::Cmd::new();
    for word in words {
        command.arg(&word[..]);
    }
    command.get_packed_command()
}

// === impl Pool ===

impl Pool {
    /// The connection that was used last and is still there.
    fn take(&self) -> Option<Connection> {
        let mut idle = self.idle.lock();
        while let Some(connection) = idle.pop() {
            if connection.used.elapsed() < IDLE && connection.is_quiet() {
                return Some(connection);
            }
        }
        None
    }
}

// === impl Connection ===

impl Connection {
    async fn open(upstream: &NamedUpstream, login: &RedisLogin) -> Result<Self, String> {
        let stated = upstream.password.as_ref().map(Secret::resolve).transpose();
        let stated = stated.map_err(|error| error.to_string())?;
        let password = stated.as_deref().or(login.password.as_deref());
        let connect = async {
            let address = resolve(upstream).await?;
            let stream = TcpStream::connect(address).await;
            let stream = stream.map_err(|error| format!("{address} cannot be reached: {error}"))?;
            // A command goes out in one write, and waits for nothing.
            let _ = stream.set_nodelay(true);
            let mut connection = Self { stream, decoder: Decoder::new(), used: Instant::now() };
            connection.set_up(login, password).await?;
            Ok(connection)
        };
        let limit = Duration::from_millis(upstream.connect_ms);
        match tokio::time::timeout(limit, connect).await {
            Ok(connection) => connection,
            Err(_) => Err(format!("not connected within {limit:?}")),
        }
    }

    async fn set_up(&mut self, login: &RedisLogin, password: Option<&str>) -> Result<(), String> {
        if password.is_none() && login.username.is_some() {
            return Err("a user name without a password is no login".to_owned());
        }
        if let Some(password) = password {
            let mut auth = cmd("AUTH");
            if let Some(username) = &login.username {
                auth.arg(username);
            }
            self.agree(&auth.arg(password).get_packed_command(), "the login").await?;
        }
        // A new connection is in the first one.
        if let Some(database) = login.database.filter(|database| *database != 0) {
            self.agree(&cmd("SELECT").arg(database).get_packed_command(), "the database").await?;
        }
        Ok(())
    }

    async fn agree(&mut self, command: &[u8], what: &str) -> Result<(), String> {
        match self.ask(command, MAX_GREETING).await?.1 {
            Value::Okay => Ok(()),
            Value::ServerError(error) => Err(format!("{what} was refused: {}", error.code())),
            _ => Err(format!("{what} got another reply than OK")),
        }
    }

    /// Sends one command and reads its one reply, as it came and as it reads.
    async fn ask(&mut self, command: &[u8], most: usize) -> Result<(Bytes, Value), String> {
        let lost = |error: std::io::Error| format!("the connection was lost: {error}");
        self.stream.write_all(command).await.map_err(lost)?;
        let mut recorder = Recorder { stream: &mut self.stream, raw: BytesMut::new(), most };
        let value = parse_redis_value_async(&mut self.decoder, &mut recorder).await;
        let raw = recorder.raw.freeze();
        match value {
            // Errors of the server are replies like others.
            _ if raw.len() > most => Err(format!("the reply is larger than {most} bytes")),
            Ok(_) if !self.decoder.buffer().is_empty() => Err("there is more than one reply".to_owned()),
            Ok(value) => Ok((raw, value)),
            Err(error) => Err(format!("the reply cannot be read: {}", error.category())),
        }
    }

    /// Whether it is open, and nothing came that nobody asked for.
    fn is_quiet(&self) -> bool {
        let mut byte = [0];
        matches!(self.stream.try_read(&mut byte), Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
    }
}

impl AsyncRead for Recorder<'_> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        let this = self.get_mut();
        if this.raw.len() > this.most {
            return Poll::Ready(Err(std::io::Error::other("too large")));
        }
        let before = into.filled().len();
        ready!(Pin::new(&mut *this.stream).poll_read(cx, into))?;
        this.raw.extend_from_slice(into.filled().get(before..).unwrap_or_default());
        Poll::Ready(Ok(()))
    }
}
