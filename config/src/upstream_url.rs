//! Where an upstream of plugins is: an HTTP server or a Redis one.

use std::{borrow::Cow, fmt, str::FromStr};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use url::Url;

use crate::{WorkerUrl, pool::NotAWorkerUrl};

/// `http://host:port`, `https://host:port` or `redis://host:port/database`: no credentials.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum UpstreamUrl {
    /// A server that speaks HTTP or gRPC.
    Http(WorkerUrl),
    /// A server that speaks Redis' protocol.
    Redis(RedisUrl),
}

/// `redis://host:port/database`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RedisUrl {
    /// Host and port, as those of an HTTP server without TLS.
    address: WorkerUrl,
    database: Option<u32>,
}

/// Why a text is no URL of an upstream. Does not repeat the text, which may hold credentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAnUpstreamUrl {
    /// Neither form.
    #[error("{0}")]
    Address(NotAWorkerUrl),
    /// Another scheme.
    #[error("the scheme must be http, https or redis")]
    Scheme,
    /// Redis over TLS.
    #[error("Redis over TLS is not supported; expected redis://host:port/database")]
    Tls,
    /// User and password of a Redis server.
    #[error("credentials do not belong in a URL; use username and password")]
    Credentials,
    /// Something else behind the port.
    #[error("expected redis://host:port/database, the database being a number")]
    Database,
}

const REDIS_SCHEME: &str = "redis://";
const REDIS_PORT: u16 = 6379;

// === impl UpstreamUrl ===

impl UpstreamUrl {
    /// Host name or IP address; an IPv6 address is without its brackets.
    pub fn host(&self) -> &str {
        self.address().host()
    }

    /// Port, the scheme's own where the URL names none.
    pub fn port(&self) -> u16 {
        self.address().port()
    }

    /// Whether it is reached over TLS.
    pub fn tls(&self) -> bool {
        self.address().tls()
    }

    /// Whether it speaks Redis' protocol.
    pub fn is_redis(&self) -> bool {
        matches!(self, Self::Redis(_))
    }

    /// The database that a Redis URL names.
    pub fn database(&self) -> Option<u32> {
        match self {
            Self::Http(_) => None,
            Self::Redis(url) => url.database,
        }
    }

    fn address(&self) -> &WorkerUrl {
        match self {
            Self::Http(url) => url,
            Self::Redis(url) => &url.address,
        }
    }
}

impl FromStr for UpstreamUrl {
    type Err = NotAnUpstreamUrl;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let scheme = text.split_once(':').map(|(scheme, _)| scheme.to_ascii_lowercase());
        match scheme.as_deref() {
            Some("redis") => redis(text).map(Self::Redis),
            Some("rediss") => Err(NotAnUpstreamUrl::Tls),
            _ => match text.parse() {
                Ok(url) => Ok(Self::Http(url)),
                Err(NotAWorkerUrl::Scheme) => Err(NotAnUpstreamUrl::Scheme),
                Err(error) => Err(NotAnUpstreamUrl::Address(error)),
            },
        }
    }
}

fn redis(text: &str) -> Result<RedisUrl, NotAnUpstreamUrl> {
    let address = |error| NotAnUpstreamUrl::Address(error);
    let url = Url::parse(text).map_err(|error| address(error.into()))?;
    if !url.username().is_empty() || url.password().is_some() {
        return Err(NotAnUpstreamUrl::Credentials);
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(NotAnUpstreamUrl::Database);
    }
    let database = match url.path().trim_start_matches('/') {
        "" => None,
        number if number.len() <= 9 && number.bytes().all(|b| b.is_ascii_digit()) => {
            Some(number.parse().map_err(|_| NotAnUpstreamUrl::Database)?)
        }
        _ => return Err(NotAnUpstreamUrl::Database),
    };
    let host = url.host_str().filter(|host| !host.is_empty()).ok_or(address(NotAWorkerUrl::Host))?;
    let port = url.port().unwrap_or(REDIS_PORT);
    let address = format!("http://{host}:{port}").parse().map_err(address)?;
    Ok(RedisUrl { address, database })
}

impl fmt::Display for UpstreamUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Http(url) => url.fmt(f),
            Self::Redis(url) => {
                write!(f, "{REDIS_SCHEME}{}", url.address.authority())?;
                url.database.map_or(Ok(()), |database| write!(f, "/{database}"))
            }
        }
    }
}

impl From<WorkerUrl> for UpstreamUrl {
    fn from(url: WorkerUrl) -> Self {
        Self::Http(url)
    }
}

impl TryFrom<String> for UpstreamUrl {
    type Error = NotAnUpstreamUrl;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<UpstreamUrl> for String {
    fn from(url: UpstreamUrl) -> Self {
        url.to_string()
    }
}

impl JsonSchema for UpstreamUrl {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "UpstreamUrl".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "format": "upstream-url" })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn http_and_redis_urls_are_read_and_written() {
        for (text, shown) in [
            ("http://a:1", "http://a:1"),
            ("https://a", "https://a:443"),
            ("redis://a", "redis://a:6379"),
            ("redis://a/", "redis://a:6379"),
            ("REDIS://10.0.0.1:7000/15", "redis://10.0.0.1:7000/15"),
            ("redis://[::1]:7000/0", "redis://[::1]:7000/0"),
        ] {
            assert_eq!(text.parse::<UpstreamUrl>().unwrap().to_string(), shown);
        }
        let url: UpstreamUrl = "redis://cache.internal/3".parse().unwrap();
        assert_eq!((url.host(), url.port(), url.tls(), url.database()), ("cache.internal", 6379, false, Some(3)));
        assert!(url.is_redis() && !"http://a:1".parse::<UpstreamUrl>().unwrap().is_redis());
    }

    #[test]
    fn what_is_wrong_is_said_without_repeating_it() {
        let error = |text: &str| text.parse::<UpstreamUrl>().unwrap_err();
        assert_eq!(error("redis://user:secret@a"), NotAnUpstreamUrl::Credentials);
        assert_eq!(error("rediss://a"), NotAnUpstreamUrl::Tls);
        assert_eq!(error("ftp://a"), NotAnUpstreamUrl::Scheme);
        for text in ["redis://a/x", "redis://a/1/2", "redis://a/-1", "redis://a/9999999999", "redis://a?db=1"] {
            assert_eq!(error(text), NotAnUpstreamUrl::Database, "{text}");
        }
        for text in ["redis://", "redis:", "redis://%zz", "http://", "redis://a b"] {
            assert!(matches!(error(text), NotAnUpstreamUrl::Address(_)), "{text}: {:?}", error(text));
        }
    }
}
