//! What workers tell about themselves in `/server_info` and `/v1/models`, read leniently, since the set of fields grows
//! with every SGLang release. Seen on 0.5.23. (Load reports are read by `turnstile_fleet::worker::Load`.)
//!
//! `/server_info` holds the worker's API keys and launch command: only the fields below are kept of it.

use serde::Deserialize;

/// The parts of `/server_info` that matter here.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct ServerInfo {
    /// SGLang's version.
    pub version: Option<String>,
    /// `python` or `rust`; the latter has no session routes.
    pub frontend: Option<String>,
    /// `--enable-session-radix-cache`.
    pub enable_session_radix_cache: bool,
    /// `--enable-streaming-session`.
    pub enable_streaming_session: bool,
    /// `--enable-priority-scheduling`.
    pub enable_priority_scheduling: bool,
    /// `--schedule-low-priority-values-first`: smaller numbers run first.
    pub schedule_low_priority_values_first: bool,
    /// `--enable-cache-report`.
    pub enable_cache_report: bool,
    /// `--stream-response-default-include-usage`: streams tell their usage unasked.
    pub stream_response_default_include_usage: bool,
    /// Data-parallel ranks.
    pub dp_size: Option<u32>,
    /// Rows of the running batch, per rank.
    pub max_running_requests: Option<u32>,
    /// Tokens of the KV pool, per rank.
    pub max_total_num_tokens: Option<u64>,
    /// Tokens of a KV page.
    pub page_size: Option<u32>,
    /// Tokens of prompts that one step computes at most; -1: no bound.
    pub chunked_prefill_size: Option<i64>,
}

impl ServerInfo {
    /// True when the worker has `/open_session` and `/close_session`.
    pub fn has_sessions(&self) -> bool {
        self.frontend.as_deref() != Some("rust")
    }
}

/// `/v1/models`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Models {
    /// The cards, passed on as they are.
    pub data: Vec<serde_json::Value>,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn unknown_and_null_fields_do_no_harm() {
        let text = r#"{"version":"0.5.23","dp_size":2,"enable_session_radix_cache":true,"api_key":"sk-secret",
            "max_queued_requests":null,"internal_states":[{"x":1}],"page_size":16}"#;
        let info: ServerInfo = serde_json::from_str(text).unwrap();
        assert_eq!(info.dp_size, Some(2));
        assert!(info.enable_session_radix_cache && !info.enable_streaming_session);
        assert!(info.has_sessions());
        assert!(!format!("{info:?}").contains("sk-secret"), "keys are not kept");
    }
}
