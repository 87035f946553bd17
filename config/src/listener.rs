//! Where clients and operators connect.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Secret;

/// One address that clients connect to. HTTP/1.1 is always spoken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Listener {
    /// IP address and port, such as `0.0.0.0:8080` or `[::]:8080`. Port 0 takes a free one.
    #[schemars(with = "String", extend("format" = "socket-address"))]
    pub address: SocketAddr,
    /// Also speak HTTP/2 without TLS to clients that open with its preface.
    pub h2c: bool,
}

/// The administrative listener.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Admin {
    /// IP address and port, or `off`. An address that other machines reach needs `token`.
    #[serde(with = "address_or_off")]
    #[schemars(with = "String", extend("format" = "socket-address-or-off", "x-restart" = true))]
    pub address: Option<SocketAddr>,
    /// Bearer token that administrative requests must carry. Absent: none is asked.
    pub token: Option<Secret>,
}

// === impl Listener ===

impl Default for Listener {
    fn default() -> Self {
        Self { address: SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 8080), h2c: true }
    }
}

// === impl Admin ===

impl Default for Admin {
    fn default() -> Self {
        Self { address: Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9180)), token: None }
    }
}

pub(crate) const OFF: &str = "off";

mod address_or_off {
    use std::net::SocketAddr;

    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    use super::OFF;

    pub(super) fn serialize<S: Serializer>(address: &Option<SocketAddr>, serializer: S) -> Result<S::Ok, S::Error> {
        match address {
            Some(address) => serializer.collect_str(address),
            None => serializer.serialize_str(OFF),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<SocketAddr>, D::Error> {
        let text = String::deserialize(deserializer)?;
        if text == OFF { Ok(None) } else { text.parse().map(Some).map_err(D::Error::custom) }
    }
}
