//! Certificates made for a test, and TLS in front of a server that speaks without.

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    date_time_ymd,
};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

/// An authority that signs certificates.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
    der: CertificateDer<'static>,
}

/// A certificate and its key.
pub struct Certified {
    /// The certificate, PEM.
    pub cert: String,
    /// Its private key, PEM.
    pub key: String,
    chain: Vec<CertificateDer<'static>>,
    private: Vec<u8>,
}

// === impl Authority ===

impl Authority {
    /// A new one.
    pub fn new(name: &str) -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key).unwrap();
        Self { pem: certificate.pem(), der: certificate.der().clone(), issuer: Issuer::new(params, key) }
    }

    /// Its certificate, PEM.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// A certificate for servers of these names or addresses, and for clients.
    pub fn sign(&self, names: &[&str]) -> Certified {
        self.signed(names, false)
    }

    /// The same, out of date.
    pub fn sign_expired(&self, names: &[&str]) -> Certified {
        self.signed(names, true)
    }

    fn signed(&self, names: &[&str], expired: bool) -> Certified {
        let key = KeyPair::generate().unwrap();
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        if expired {
            (params.not_before, params.not_after) = (date_time_ymd(2001, 1, 1), date_time_ymd(2002, 1, 1));
        }
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        Certified {
            cert: certificate.pem(),
            key: key.serialize_pem(),
            chain: vec![certificate.der().clone()],
            private: key.serialize_der(),
        }
    }
}

/// TLS in front of a server. Dropped, it ends.
pub struct TlsFront {
    addr: SocketAddr,
    accepted: Arc<AtomicUsize>,
    _tasks: JoinSet<()>,
}

// === impl TlsFront ===

impl TlsFront {
    /// In front of the server at `http://host:port`. It agrees on one of `protocols` (`h2`, `http/1.1`), and with `clients` it
    /// takes only those with a certificate of that authority.
    pub async fn start(url: &str, own: &Certified, protocols: &[&str], clients: Option<&Authority>) -> Self {
        let backend: SocketAddr = url.strip_prefix("http://").unwrap().parse().unwrap();
        let provider = Arc::new(default_provider());
        let config = ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions();
        let config = match clients {
            None => config.unwrap().with_no_client_auth(),
            Some(authority) => {
                let mut roots = RootCertStore::empty();
                roots.add(authority.der.clone()).unwrap();
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build().unwrap();
                config.unwrap().with_client_cert_verifier(verifier)
            }
        };
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(own.private.clone()));
        let mut config = config.with_single_cert(own.chain.clone(), key).unwrap();
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let accepted = Arc::new(AtomicUsize::new(0));
        let (mut tasks, count) = (JoinSet::new(), Arc::clone(&accepted));
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, count) = (acceptor.clone(), Arc::clone(&count));
                connections.spawn(async move {
                    // Whoever is not taken, or does not like what it sees, goes away.
                    let Ok(mut outside) = acceptor.accept(stream).await else { return };
                    count.fetch_add(1, Ordering::Relaxed);
                    let mut inside = TcpStream::connect(backend).await.unwrap();
                    let _ = tokio::io::copy_bidirectional(&mut outside, &mut inside).await;
                });
                while connections.try_join_next().is_some() {}
            }
        });
        Self { addr, accepted, _tasks: tasks }
    }

    /// `https://127.0.0.1:port`.
    pub fn url(&self) -> String {
        format!("https://{}", self.addr)
    }

    /// Connections on which both sides were content.
    pub fn accepted(&self) -> usize {
        self.accepted.load(Ordering::Relaxed)
    }
}
