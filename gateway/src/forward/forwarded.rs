//! What a worker is told of its client. Only a trusted proxy is believed about who stands behind it; whatever anybody else
//! says in these headers ends here, so that no log or rule of a worker can be fed with it.

use http::{HeaderMap, HeaderName, HeaderValue, header};
use std::net::IpAddr;
use turnstile_config::{Forwarded, ForwardedSend};

const FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const PORT: HeaderName = HeaderName::from_static("x-forwarded-port");
const REAL_IP: HeaderName = HeaderName::from_static("x-real-ip");

/// Where a request came from.
#[derive(Debug, Clone, Copy)]
pub struct Origin<'a> {
    /// The address of the connection; none for a peer without one.
    pub peer: Option<IpAddr>,
    /// The host asked for.
    pub host: &'a [u8],
}

/// Whether the header is one of these. Names in a [`HeaderMap`] are lower case.
pub fn tells_origin(name: &HeaderName) -> bool {
    *name == header::FORWARDED || [FOR, PROTO, HOST, PORT, REAL_IP].contains(name)
}

/// Hands to `put` what the worker is told, each header once. `client` are the headers that came.
///
/// # Errors
/// Those of `put`.
pub fn tell<E>(
    client: &HeaderMap,
    origin: Origin<'_>,
    options: &Forwarded,
    put: &mut dyn FnMut(&HeaderName, &HeaderValue) -> Result<(), E>,
) -> Result<(), E> {
    if options.send == ForwardedSend::None {
        return Ok(());
    }
    let peer = origin.peer.map(|ip| ip.to_canonical());
    let believed = peer.is_some_and(|ip| options.trusted.iter().any(|network| network.contains(ip)));
    let said = |name: &HeaderName| client.get(name).filter(|_| believed).cloned();
    let joined = |name: &HeaderName, last: Option<String>| {
        let said = client.get_all(name).iter().filter(|_| believed).map(HeaderValue::as_bytes);
        let all: Vec<&[u8]> = said.chain(last.as_deref().map(str::as_bytes)).collect();
        HeaderValue::from_bytes(&all.join(b", ".as_slice())).ok().filter(|value| !value.is_empty())
    };
    let address = peer.and_then(|ip| HeaderValue::try_from(ip.to_string()).ok());
    let told = [
        (FOR, joined(&FOR, peer.map(|ip| ip.to_string()))),
        (PROTO, said(&PROTO).or_else(|| Some(HeaderValue::from_static("http")))),
        (HOST, said(&HOST).or_else(|| HeaderValue::from_bytes(origin.host).ok().filter(|host| !host.is_empty()))),
        (PORT, said(&PORT)),
        (REAL_IP, said(&REAL_IP).or(address)),
        // Only continued where a proxy began it: the others say the same.
        (header::FORWARDED, said(&header::FORWARDED).and_then(|_| joined(&header::FORWARDED, peer.map(element)))),
    ];
    for (name, value) in told {
        if let Some(value) = value {
            put(&name, &value)?;
        }
    }
    Ok(())
}

/// An element of `Forwarded` (RFC 7239): an IPv6 address is bracketed and quoted there.
fn element(peer: IpAddr) -> String {
    match peer {
        IpAddr::V4(ip) => format!("for={ip}"),
        IpAddr::V6(ip) => format!("for=\"[{ip}]\""),
    }
}

#[cfg(test)]
#[path = "forwarded_tests.rs"]
mod tests;
