//! Modules from URLs: fetched off the request path, kept by their digest in a directory that only the gateway can write.
//!
//! A module is what its digest says, wherever it was found. So a redirect may lead anywhere, and what was fetched once is
//! not fetched again.

use crate::module_file;
use crate::upstream::{ConnectionLimits, Target, describe};
use bytes::{Bytes, BytesMut};
use http::{StatusCode, header};
use pingora_core::connectors::http::Connector;
use pingora_core::protocols::http::client::HttpSession;
use sha2::{Digest, Sha256};
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use turnstile_plugins::PrivateDir;
use url::{Host, Url};

/// Most modules kept; the oldest go first.
const MAX_MODULES: usize = 64;
const EXTENSION: &str = "wasm";
/// The longest that a fetch may take, redirects included.
const FETCH_LIMIT: Duration = Duration::from_secs(60);
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// A download page sends to a store, and that perhaps to another.
const MAX_REDIRECTS: usize = 5;

/// Where fetched modules are kept. Without a directory each reload that needs one fetches it.
#[derive(Debug, Default)]
pub struct ModuleStore {
    dir: Option<PrivateDir>,
}

impl ModuleStore {
    /// Keeps modules in this directory, unless others could write there: then nothing is kept, with a warning.
    pub fn open(dir: Option<&Path>) -> Self {
        let dir = dir.and_then(|dir| match PrivateDir::open(dir) {
            Ok(private) => Some(private),
            Err(reason) => {
                tracing::warn!(dir = %dir.display(), %reason, "fetched modules are not kept");
                None
            }
        });
        Self { dir }
    }

    /// The module with this digest (SHA-256, lowercase hexadecimal): kept, or fetched now. Blocks, and must not be called
    /// from a task.
    ///
    /// # Errors
    /// Text that says why there is none.
    pub fn get(&self, url: &Url, sha256: &str) -> Result<Arc<[u8]>, String> {
        if let Some(kept) = self.kept(sha256) {
            return Ok(kept);
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| e.to_string())?;
        let fetching = async {
            let fetched = tokio::time::timeout(FETCH_LIMIT, fetch(url.clone())).await;
            fetched.unwrap_or_else(|_| Err(format!("not there within {} s", FETCH_LIMIT.as_secs())))
        };
        let module = runtime.block_on(fetching)?;
        let found = digest(&module);
        if found != sha256 {
            return Err(format!("has the SHA-256 {found}, and sha256 says {sha256}"));
        }
        tracing::info!(%url, bytes = module.len(), "module fetched");
        if let Err(reason) = self.keep(sha256, &module) {
            tracing::warn!(%url, %reason, "fetched module could not be kept");
        }
        Ok(module[..].into())
    }

    fn path(&self, sha256: &str) -> Option<PathBuf> {
        Some(self.dir.as_ref()?.path().join(format!("{sha256}.{EXTENSION}")))
    }

    fn kept(&self, sha256: &str) -> Option<Arc<[u8]>> {
        let path = self.path(sha256)?;
        if !path.exists() {
            return None;
        }
        let read = self.dir.as_ref()?.check(&path).and_then(|()| module_file::read(&path));
        match read {
            Ok(module) if digest(&module) == sha256 => return Some(module.into()),
            Ok(_) => tracing::warn!(file = %path.display(), "kept module is not sound: fetching it again"),
            Err(error) => {
                tracing::warn!(file = %path.display(), %error, "kept module cannot be read: fetching it again")
            }
        }
        let _ = fs::remove_file(&path);
        None
    }

    fn keep(&self, sha256: &str, module: &[u8]) -> io::Result<()> {
        let (Some(dir), Some(path)) = (&self.dir, self.path(sha256)) else { return Ok(()) };
        dir.write(&path, module)?;
        dir.surplus(EXTENSION, MAX_MODULES)?.iter().try_for_each(fs::remove_file)
    }
}

/// SHA-256, lowercase hexadecimal.
pub fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

async fn fetch(mut url: Url) -> Result<Bytes, String> {
    let connector = Connector::new(None);
    for _ in 0..=MAX_REDIRECTS {
        match request(&connector, &url).await? {
            Fetched::Module(module) => return Ok(module),
            Fetched::Redirect(to) if url.scheme() == "https" && to.scheme() != "https" => {
                return Err(format!("{url} redirects to {to}, which is not https"));
            }
            Fetched::Redirect(to) => url = to,
        }
    }
    Err(format!("more than {MAX_REDIRECTS} redirects"))
}

enum Fetched {
    Module(Bytes),
    Redirect(Url),
}

async fn request(connector: &Connector, url: &Url) -> Result<Fetched, String> {
    let fail = |e: Box<pingora_core::Error>| describe(&e);
    let (mut session, authority) = connect(connector, url).await?;
    let mut path = url.path().to_owned();
    if let Some(query) = url.query() {
        path.push('?');
        path.push_str(query);
    }
    let mut head = pingora_http::RequestHeader::build("GET", path.as_bytes(), Some(4)).map_err(fail)?;
    head.insert_header(header::HOST, authority).map_err(fail)?;
    head.insert_header(header::USER_AGENT, concat!("turnstile/", env!("CARGO_PKG_VERSION"))).map_err(fail)?;
    head.insert_header(header::ACCEPT, "*/*").map_err(fail)?;
    head.insert_header(header::ACCEPT_ENCODING, "identity").map_err(fail)?;
    session.write_request_header(Box::new(head)).await.map_err(fail)?;
    session.finish_request_body().await.map_err(fail)?;
    let status = loop {
        session.read_response_header().await.map_err(fail)?;
        let status = session.response_header().map_or(0, |h| h.status.as_u16());
        if !(100..200).contains(&status) {
            break status;
        }
    };
    let location = || session.response_header().and_then(|h| h.headers.get(header::LOCATION));
    match StatusCode::from_u16(status) {
        Ok(StatusCode::OK) => {}
        Ok(status) if status.is_redirection() && location().is_some() => {
            let to = location().and_then(|l| l.to_str().ok()).and_then(|l| url.join(l).ok());
            let to = to.filter(|to| matches!(to.scheme(), "http" | "https"));
            return to.map(Fetched::Redirect).ok_or_else(|| "redirects to no URL of http or https".to_owned());
        }
        _ => return Err(format!("answered {status}")),
    }
    let mut module = BytesMut::new();
    while let Some(chunk) = session.read_response_body().await.map_err(fail)? {
        if (module.len() + chunk.len()) as u64 > module_file::MAX_BYTES {
            session.shutdown().await;
            return Err(format!("is larger than {} MiB", module_file::MAX_BYTES >> 20));
        }
        module.extend_from_slice(&chunk);
    }
    Ok(Fetched::Module(module.freeze()))
}

/// A connection to the URL's host, by the first of its addresses that takes one, and what goes into `Host`.
async fn connect(connector: &Connector, url: &Url) -> Result<(HttpSession, String), String> {
    let host = url.host().ok_or("the URL names no host")?;
    let port = url.port_or_known_default().ok_or("the URL names no port")?;
    let authority = match url.port() {
        Some(port) => format!("{host}:{port}"),
        None => host.to_string(),
    };
    let (name, addresses) = match host {
        Host::Ipv4(ip) => (ip.to_string(), vec![SocketAddr::from((ip, port))]),
        Host::Ipv6(ip) => (ip.to_string(), vec![SocketAddr::from((ip, port))]),
        Host::Domain(name) => {
            let found = tokio::net::lookup_host((name, port)).await.map_err(|e| format!("{name}: {e}"))?;
            (name.to_owned(), found.collect())
        }
    };
    let limits = ConnectionLimits { connect: CONNECT_LIMIT, idle: CONNECT_LIMIT };
    let mut last = format!("{name} has no address");
    for address in addresses {
        let target = Target::new(address, &name, url.scheme() == "https", false, limits);
        match connector.get_http_session(&target.peer).await {
            Ok((session, _)) => return Ok((session, authority)),
            Err(error) => last = describe(&error),
        }
    }
    Err(last)
}

#[cfg(test)]
#[path = "module_store_tests.rs"]
mod tests;
