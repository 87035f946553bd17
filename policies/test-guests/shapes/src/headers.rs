//! Headers, read and written.

use log::info;
use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::Action;

/// Logs and edits headers.
#[derive(Default)]
pub struct Headers {
    /// What the request asked to be done to its response.
    new_status: Option<String>,
    answer_late: bool,
}

impl Context for Headers {
    fn on_done(&mut self) -> bool {
        info!("headers: done");
        true
    }
}

impl HttpContext for Headers {
    fn on_http_request_headers(&mut self, count: usize, end_of_stream: bool) -> Action {
        let headers = self.get_http_request_headers_bytes();
        info!("headers: request, count right {}, end {end_of_stream}", headers.len() == count);
        for (name, value) in &headers {
            info!("headers: > {name}: {}", String::from_utf8_lossy(value));
        }
        self.new_status = self.get_http_request_header("x-new-status");
        self.answer_late = self.get_http_request_header("x-answer-late").is_some();
        if let Some(status) = self.get_http_request_header("x-answer") {
            let status = status.parse().unwrap_or(400);
            self.send_http_response(
                status,
                vec![("x-by", "headers"), ("x-twice", "a"), ("x-twice", "b")],
                Some(b"an answer of the filter\n"),
            );
            return Action::Pause;
        }
        if self.get_http_request_header("x-edit").is_some() {
            self.add_http_request_header("x-added", "1");
            self.add_http_request_header("x-many", "second");
            self.set_http_request_header("x-replaced", Some("new"));
            self.set_http_request_header("x-removed", None);
            self.set_http_request_header("x-emptied", Some(""));
        }
        if let Some(path) = self.get_http_request_header("x-new-path") {
            self.set_http_request_header(":path", Some(&path));
        }
        if let Some(authority) = self.get_http_request_header("x-new-authority") {
            self.set_http_request_header(":authority", Some(&authority));
        }
        Action::Continue
    }

    fn on_http_response_headers(&mut self, count: usize, end_of_stream: bool) -> Action {
        let headers = self.get_http_response_headers_bytes();
        info!("headers: response, count right {}, end {end_of_stream}", headers.len() == count);
        info!("headers: status {:?}", self.get_http_response_header(":status"));
        self.add_http_response_header("x-response-added", "1");
        self.set_http_response_header("x-response-replaced", Some("new"));
        self.set_http_response_header("x-response-removed", None);
        if let Some(status) = self.new_status.take() {
            self.set_http_response_header(":status", Some(&status));
        }
        if self.answer_late {
            self.send_http_response(418, vec![("x-by", "headers, late")], Some(b"a late answer of the filter\n"));
            return Action::Pause;
        }
        Action::Continue
    }

    fn on_log(&mut self) {
        info!("headers: log, status {:?}", self.get_http_response_header(":status"));
    }
}

/// Reads the request's headers once the response is there.
pub struct LookBack;

impl Context for LookBack {}

impl HttpContext for LookBack {
    fn on_http_response_headers(&mut self, _count: usize, _end_of_stream: bool) -> Action {
        let method = self.get_http_request_header(":method");
        self.add_http_response_header("x-method-was", method.as_deref().unwrap_or("gone"));
        Action::Continue
    }
}

/// Says what it was configured with.
pub struct Configured {
    /// The configuration's `value`.
    pub value: String,
}

impl Context for Configured {}

impl HttpContext for Configured {
    fn on_http_response_headers(&mut self, _count: usize, _end_of_stream: bool) -> Action {
        self.add_http_response_header("x-configured", &self.value);
        Action::Continue
    }
}
