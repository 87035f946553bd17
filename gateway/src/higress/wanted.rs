//! Where the plugins of Higress' dialect want a request to go: what they said by import or by header, and which workers that
//! is.

use super::cluster;
use super::hosts::address;
use crate::generation::PoolRuntime;
use crate::workers::Worker;
use pingora_http::RequestHeader;
use std::sync::Arc;
use turnstile_fleet::ids::WorkerId;
use turnstile_plugins::{FieldMap, TARGET_HEADERS};

/// Most hosts of one list.
const MAX_HOSTS: usize = 16;
/// Most bytes of a list, or of a cluster's name.
const MAX_BYTES: usize = 1024;

const ENDPOINT: &str = TARGET_HEADERS[0];
const ORIGINAL_DESTINATION: &str = TARGET_HEADERS[1];
const CLUSTER: &str = TARGET_HEADERS[2];

/// Where a request is wanted to go.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Addresses or names of hosts, the first one first.
    hosts: Vec<String>,
    /// A cluster's name, for a request without hosts.
    cluster: Option<String>,
}

/// What came of a wish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// The request went there.
    Followed,
    /// No worker of the request's pool is meant.
    Unknown,
    /// The worker is not ready, or has failed this request.
    Unavailable,
    /// The request's session, or a policy, did not allow it.
    Barred,
}

/// As [`strip`], for a request as it came.
pub fn strip_request(head: &mut RequestHeader) {
    for name in TARGET_HEADERS {
        head.remove_header(name);
    }
}

/// Takes the headers that name a host out of a request: a client has nothing to say there, and a worker nothing to read.
fn strip(headers: &mut FieldMap) {
    if TARGET_HEADERS.iter().any(|name| headers.fields.contains_key(*name)) {
        let headers = headers.fields_mut();
        TARGET_HEADERS.iter().for_each(|name| drop(headers.remove(*name)));
    }
}

impl Kept {
    /// The name in metrics and in the access log.
    pub fn name(self) -> &'static str {
        match self {
            Self::Followed => "followed",
            Self::Unknown => "unknown",
            Self::Unavailable => "unavailable",
            Self::Barred => "barred",
        }
    }
}

impl Wanted {
    /// What plugins said: `host` by import, which counts before what they wrote into the request's headers. These are taken
    /// out. Nothing if they said nothing.
    pub fn take(host: Option<String>, headers: &mut FieldMap) -> Option<Self> {
        let text = |name: &str| {
            let value = headers.fields.get(name)?.to_str().ok()?;
            (value.len() <= MAX_BYTES).then(|| value.to_owned())
        };
        let list = host.or_else(|| text(ENDPOINT)).or_else(|| text(ORIGINAL_DESTINATION)).unwrap_or_default();
        let hosts = list.split(',').map(str::trim).filter(|host| !host.is_empty());
        let wanted = Self { hosts: hosts.take(MAX_HOSTS).map(str::to_owned).collect(), cluster: text(CLUSTER) };
        strip(headers);
        (wanted != Self::default()).then_some(wanted)
    }

    /// The workers meant, among those of a pool.
    pub fn workers(&self, workers: &[Arc<Worker>]) -> Vec<WorkerId> {
        let named = |name: &str| workers.iter().find(|worker| &*worker.id == name);
        let at = |host: &str| workers.iter().find(|worker| address(worker) == host || worker.url.authority() == host);
        if self.hosts.is_empty() {
            let names = self.cluster.iter().flat_map(|cluster| cluster::names(cluster));
            return names.filter_map(named).map(|worker| worker.index).take(1).collect();
        }
        self.hosts.iter().filter_map(|host| at(host).or_else(|| named(host))).map(|worker| worker.index).collect()
    }

    /// The pool that a cluster names, unless it means a worker of the one that is usual for the request.
    pub fn pool<'a>(&self, usual: Option<&PoolRuntime>, pools: &'a [PoolRuntime]) -> Option<&'a PoolRuntime> {
        let cluster = self.cluster.as_deref().filter(|_| self.hosts.is_empty())?;
        if usual.is_some_and(|pool| !self.workers(&pool.workers).is_empty()) {
            return None;
        }
        cluster::names(cluster).find_map(|name| pools.iter().find(|pool| &*pool.name == name))
    }
}

impl std::fmt::Display for Wanted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.cluster {
            Some(cluster) if self.hosts.is_empty() => f.write_str(cluster),
            _ => f.write_str(&self.hosts.join(",")),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use http::{HeaderMap, HeaderValue};

    fn headers(pairs: &[(&'static str, &'static str)]) -> FieldMap {
        let pair =
            |(name, value): &(&'static str, &'static str)| (name.parse().unwrap(), HeaderValue::from_static(value));
        FieldMap::new(pairs.iter().map(pair).collect::<HeaderMap>())
    }

    #[test]
    fn headers_are_read_once_and_taken_out() {
        let mut map =
            headers(&[("x-a", "1"), (ENDPOINT, "10.0.0.1:1, 10.0.0.2:2,,"), (CLUSTER, "outbound|80||a.static")]);
        let wanted = Wanted::take(None, &mut map).unwrap();
        assert_eq!(wanted.hosts, ["10.0.0.1:1", "10.0.0.2:2"]);
        assert_eq!(map.fields, headers(&[("x-a", "1")]).fields);
        assert_eq!(Wanted::take(None, &mut map), None);
    }

    #[test]
    fn what_was_said_by_import_counts_first() {
        let mut map = headers(&[(ENDPOINT, "10.0.0.1:1"), (ORIGINAL_DESTINATION, "10.0.0.2:2")]);
        let wanted = Wanted::take(Some("10.0.0.3:3".to_owned()), &mut map).unwrap();
        assert_eq!((wanted.hosts, map.fields.len()), (vec!["10.0.0.3:3".to_owned()], 0));
    }

    #[test]
    fn odd_values_say_nothing_and_are_taken_out_all_the_same() {
        let mut map = headers(&[(ENDPOINT, " ,"), (ORIGINAL_DESTINATION, "")]);
        map.fields_mut().insert(CLUSTER, HeaderValue::from_bytes(b"\xff").unwrap());
        assert_eq!(Wanted::take(None, &mut map), None);
        map.fields_mut().insert(CLUSTER, HeaderValue::from_str(&"a".repeat(MAX_BYTES + 1)).unwrap());
        assert_eq!((Wanted::take(None, &mut map), map.fields.len()), (None, 0));
        let many = vec!["h"; 100].join(",");
        assert_eq!(Wanted::take(Some(many), &mut map).unwrap().hosts.len(), MAX_HOSTS);
    }
}
