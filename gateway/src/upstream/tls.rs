//! TLS towards workers and upstreams: whom the gateway trusts, and by what it shows itself. Read from files once for each
//! configuration; what is read has been checked, since the connector takes what is wrong for granted.

use super::Target;
use pingora_core::protocols::tls::CaType;
use pingora_core::utils::tls::{CertKey, WrappedX509};
use rustls::RootCertStore;
use rustls::crypto::ring::default_provider;
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;
use turnstile_config::TlsOptions;
use x509_parser::prelude::{FromDer as _, X509Certificate};
use xxhash_rust::xxh3::Xxh3;

/// A larger file holds no certificates that anybody means.
const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// Everything that connections over TLS are made with, beyond the host's name and the system's trust.
#[derive(Clone)]
pub struct Tls {
    verify: bool,
    server_name: Option<String>,
    authorities: Option<Arc<CaType>>,
    own: Option<Arc<CertKey>>,
    /// Connections are pooled by this: one that was made under other rules is none for these. 0 where nothing is set.
    group: u64,
}

/// What is wrong with an option.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {reason}")]
pub struct TlsFault {
    /// The option.
    pub key: &'static str,
    /// Why it cannot be followed, the file included.
    pub reason: String,
}

// === impl Tls ===

impl Tls {
    /// Reads the files of these options.
    ///
    /// # Errors
    /// The first option that cannot be followed.
    pub fn load(options: TlsOptions<'_>) -> Result<Self, TlsFault> {
        let mut group = Xxh3::new();
        if let Some(name) = options.server_name {
            let fault = |_| TlsFault { key: "server_name", reason: format!("{name:?} is no host name or address") };
            ServerName::try_from(name).map_err(fault)?;
        }
        let authorities = options.ca_file.map(|path| authorities(path, &mut group)).transpose()?;
        let own = match (options.client_cert, options.client_key) {
            (Some(cert), Some(key)) => Some(own(cert, key, &mut group)?),
            _ => None,
        };
        group.update(options.server_name.unwrap_or_default().as_bytes());
        group.update(&[u8::from(options.verify)]);
        let is_default = options.verify && options.server_name.is_none() && authorities.is_none() && own.is_none();
        Ok(Self {
            verify: options.verify,
            server_name: options.server_name.map(str::to_owned),
            authorities,
            own,
            group: if is_default { 0 } else { group.digest() | 1 },
        })
    }

    /// Has connections to `target` made under these rules.
    pub fn apply(&self, target: &mut Target) {
        let peer = &mut target.peer;
        if let Some(name) = &self.server_name {
            peer.sni.clone_from(name);
        }
        peer.options.verify_cert = self.verify;
        peer.options.verify_hostname = self.verify;
        peer.options.ca.clone_from(&self.authorities);
        peer.client_cert_key.clone_from(&self.own);
        peer.group_key = self.group;
    }
}

impl PartialEq for Tls {
    fn eq(&self, other: &Self) -> bool {
        self.group == other.group
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls")
            .field("verify", &self.verify)
            .field("server_name", &self.server_name)
            .finish_non_exhaustive()
    }
}

fn fault(key: &'static str, path: &Path, reason: impl fmt::Display) -> TlsFault {
    TlsFault { key, reason: format!("{}: {reason}", path.display()) }
}

fn read(key: &'static str, path: &Path) -> Result<Vec<u8>, TlsFault> {
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes))
        .map_err(|error| fault(key, path, format!("cannot be read: {error}")))?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(fault(key, path, format!("is larger than {MAX_FILE_BYTES} bytes")));
    }
    Ok(bytes)
}

/// The certificates of a file; at least one.
fn certificates(key: &'static str, path: &Path, group: &mut Xxh3) -> Result<Vec<CertificateDer<'static>>, TlsFault> {
    let bytes = read(key, path)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let found: Vec<CertificateDer<'static>> =
        found.map_err(|error| fault(key, path, format!("is no PEM: {error:?}")))?;
    if found.is_empty() {
        return Err(fault(key, path, "has no certificate (-----BEGIN CERTIFICATE-----)"));
    }
    for certificate in &found {
        let (_, parsed) = X509Certificate::from_der(certificate)
            .map_err(|error| fault(key, path, format!("has a certificate that cannot be read: {error}")))?;
        if !parsed.validity().is_valid() {
            let (from, to) = (parsed.validity().not_before, parsed.validity().not_after);
            tracing::warn!(key, file = %path.display(), subject = %parsed.subject(), %from, %to, "a certificate is not valid now");
        }
        group.update(&(certificate.len() as u64).to_le_bytes());
        group.update(certificate);
    }
    Ok(found)
}

fn authorities(path: &Path, group: &mut Xxh3) -> Result<Arc<CaType>, TlsFault> {
    const KEY: &str = "ca_file";
    let mut store = RootCertStore::empty();
    let mut authorities = Vec::new();
    for certificate in certificates(KEY, path, group)? {
        let unusable = |error| fault(KEY, path, format!("has a certificate that cannot be trusted: {error}"));
        store.add(certificate.clone()).map_err(unusable)?;
        let parsed =
            WrappedX509::try_new(certificate.to_vec(), |der| X509Certificate::from_der(der).map(|(_, x509)| x509));
        authorities.push(parsed.map_err(|error| fault(KEY, path, error))?);
    }
    Ok(authorities.into())
}

fn own(cert: &Path, key: &Path, group: &mut Xxh3) -> Result<Arc<CertKey>, TlsFault> {
    const KEY: &str = "client_key";
    let chain = certificates("client_cert", cert, group)?;
    let pem = read(KEY, key)?;
    let private = PrivateKeyDer::from_pem_slice(&pem)
        .map_err(|error| fault(KEY, key, format!("has no private key (-----BEGIN PRIVATE KEY-----): {error:?}")))?;
    let der = private.secret_der().to_vec();
    // As the connector reads it.
    let private = PrivateKeyDer::try_from(der.clone()).map_err(|error| fault(KEY, key, error))?;
    CertifiedKey::from_der(chain.clone(), private, &default_provider()).map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => fault(KEY, key, format!("is not the key of {}", cert.display())),
        error => fault(KEY, key, format!("cannot be used: {error}")),
    })?;
    group.update(&der);
    Ok(Arc::new(CertKey::new(chain.iter().map(|certificate| certificate.to_vec()).collect(), der)))
}
