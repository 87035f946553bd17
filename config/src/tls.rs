//! TLS towards workers and upstreams.

use std::path::Path;

use crate::{NamedUpstream, Pool};

/// How the other side of a connection is verified, and how the gateway shows itself to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TlsOptions<'a> {
    /// Refuse a certificate that is not valid.
    pub verify: bool,
    /// Name that is asked for and that the certificate must have. Absent: the host of the URL.
    pub server_name: Option<&'a str>,
    /// Certificates of the authorities that are trusted, PEM. Absent: the system's.
    pub ca_file: Option<&'a Path>,
    /// The gateway's own certificate and those it follows from, PEM.
    pub client_cert: Option<&'a Path>,
    /// Its private key, PEM.
    pub client_key: Option<&'a Path>,
}

impl TlsOptions<'_> {
    /// The files that are named, each with its key.
    pub fn files(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        let files = [("ca_file", self.ca_file), ("client_cert", self.client_cert), ("client_key", self.client_key)];
        files.into_iter().filter_map(|(key, path)| path.map(|path| (key, path)))
    }
}

impl Pool {
    /// Its TLS options, for workers with an `https` URL.
    pub fn tls_options(&self) -> TlsOptions<'_> {
        TlsOptions {
            verify: true,
            server_name: self.server_name.as_deref(),
            ca_file: self.ca_file.as_deref(),
            client_cert: self.client_cert.as_deref(),
            client_key: self.client_key.as_deref(),
        }
    }
}

impl NamedUpstream {
    /// Its TLS options, for an `https` URL.
    pub fn tls_options(&self) -> TlsOptions<'_> {
        TlsOptions {
            verify: self.verify,
            server_name: self.server_name.as_deref(),
            ca_file: self.ca_file.as_deref(),
            client_cert: self.client_cert.as_deref(),
            client_key: self.client_key.as_deref(),
        }
    }
}
