//! A request written down as JSON: `{"path", "headers", "body"}`, as `POST /explain` and self-tests take it.

use crate::policy::RequestHead;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use serde::Deserialize;
use std::sync::Arc;
use std::time::SystemTime;
use turnstile_config::Config;
use turnstile_fleet::route::Route;

#[derive(Deserialize)]
struct Written {
    #[serde(default = "chat")]
    path: String,
    #[serde(default)]
    headers: std::collections::BTreeMap<String, String>,
    body: Box<serde_json::value::RawValue>,
}

fn chat() -> String {
    "/v1/chat/completions".into()
}

/// One of them.
#[derive(Debug)]
pub struct RecordedRequest {
    /// Where it goes.
    pub route: Route,
    /// The same, as it was written.
    pub path: String,
    /// Its headers.
    pub headers: Arc<HeaderMap>,
    /// Its body, byte for byte.
    pub body: Bytes,
}

impl RecordedRequest {
    /// Reads one.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn read(text: &[u8]) -> Result<Self, String> {
        let written: Written =
            serde_json::from_slice(text).map_err(|e| format!("expected {{path, headers, body}}: {e}"))?;
        let route = Route::from_path(&written.path).ok_or_else(|| format!("path: no route {}", written.path))?;
        let mut headers = HeaderMap::new();
        for (name, value) in &written.headers {
            let name = HeaderName::try_from(name.as_str()).map_err(|_| format!("headers: bad name {name:?}"))?;
            let value = HeaderValue::try_from(value.as_str()).map_err(|_| format!("headers.{name}: bad value"))?;
            headers.append(name, value);
        }
        let body = Bytes::copy_from_slice(written.body.get().as_bytes());
        Ok(Self { route, path: written.path, headers: Arc::new(headers), body })
    }

    /// Its head, as if it came now.
    pub fn head(&self, request_id: &str) -> RequestHead {
        RequestHead {
            method: Method::POST,
            path: Bytes::from(self.path.clone()),
            authority: Bytes::new(),
            headers: Arc::clone(&self.headers),
            request_id: Arc::from(request_id),
            peer: None,
            connection: 0,
            protocol: "HTTP/1.1",
            arrived: SystemTime::now(),
        }
    }
}

/// The pool of a configuration that serves a model, by position: the one that names it, else the one that takes any.
pub fn pool_for(config: &Config, model: Option<&str>) -> Option<usize> {
    let named = config.pools.iter().position(|p| p.models.iter().any(|m| Some(m.as_str()) == model));
    let only = (model.is_none() && config.pools.len() == 1).then_some(0);
    named.or_else(|| config.pools.iter().position(|p| p.models.is_empty())).or(only)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn errors_name_the_member() {
        let error = |json: &str| RecordedRequest::read(json.as_bytes()).unwrap_err();
        assert!(error("1").contains("{path, headers, body}"));
        assert!(error("{}").contains("missing field `body`"));
        assert_eq!(error(r#"{"path": "/nowhere", "body": {}}"#), "path: no route /nowhere");
        assert_eq!(error(r#"{"headers": {"a b": "x"}, "body": {}}"#), r#"headers: bad name "a b""#);
        assert_eq!(error(r#"{"headers": {"a": "\n"}, "body": {}}"#), "headers.a: bad value");
    }

    #[test]
    fn the_body_stays_as_it_was_written() {
        let request = RecordedRequest::read(br#"{"body": {"model":  "m", "n": 1.50}}"#).unwrap();
        assert_eq!(&request.body[..], br#"{"model":  "m", "n": 1.50}"#);
        assert_eq!(request.path, "/v1/chat/completions");
    }
}
