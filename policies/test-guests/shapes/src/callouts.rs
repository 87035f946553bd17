//! HTTP callouts to the upstream `auth`.

use std::time::Duration;

use log::info;
use proxy_wasm::hostcalls;
use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::Action;

const PATIENCE: Duration = Duration::from_millis(500);

fn call(context: &dyn Context, upstream: &str, path: &str, body: Option<&[u8]>) -> Option<u32> {
    let headers = vec![(":method", "GET"), (":path", path), (":authority", "auth.test"), ("x-asked-by", "shapes")];
    match context.dispatch_http_call(upstream, headers, body, vec![], PATIENCE) {
        Ok(token) => Some(token),
        Err(status) => {
            info!("callout: refused at once, {status:?}");
            None
        }
    }
}

/// One call, which decides.
pub struct One;

impl Context for One {
    fn on_http_call_response(&mut self, _token: u32, headers: usize, body_size: usize, trailers: usize) {
        info!("callout: reply, headers {}, body {body_size}, trailers {trailers}", headers > 0);
        if headers == 0 {
            let (code, text) = hostcalls::get_grpc_status().unwrap_or((0, None));
            info!("callout: failed, code {code}, text {}", text.is_some());
            self.send_http_response(503, vec![("x-by", "callout")], Some(b"no verdict\n"));
            return;
        }
        let status = self.get_http_call_response_header(":status");
        let replied = self.get_http_call_response_header("x-origin");
        info!("callout: status {status:?}, x-origin {replied:?}");
        let body = self.get_http_call_response_body(0, body_size).unwrap_or_default();
        if body.first() == Some(&b'y') {
            // An edit of the request from within the reply.
            self.add_http_request_header("x-verdict", "yes");
            self.resume_http_request();
        } else {
            self.send_http_response(403, vec![("x-by", "callout")], Some(b"not allowed\n"));
        }
    }
}

impl HttpContext for One {
    fn on_http_request_headers(&mut self, _count: usize, _end_of_stream: bool) -> Action {
        let path = self.get_http_request_header("x-ask").unwrap_or_else(|| "/yes".to_owned());
        let upstream = self.get_http_request_header("x-upstream").unwrap_or_else(|| "auth".to_owned());
        match call(self, &upstream, &path, None) {
            Some(_) => Action::Pause,
            None => {
                self.send_http_response(500, vec![("x-by", "callout")], Some(b"no call\n"));
                Action::Pause
            }
        }
    }

    fn on_http_response_headers(&mut self, _count: usize, _end_of_stream: bool) -> Action {
        self.add_http_response_header("x-after-callout", "1");
        Action::Continue
    }
}

/// Three calls at once.
#[derive(Default)]
pub struct Three {
    tokens: Vec<u32>,
    replies: Vec<(u32, String)>,
}

impl Context for Three {
    fn on_http_call_response(&mut self, token: u32, _headers: usize, body_size: usize, _trailers: usize) {
        let body = self.get_http_call_response_body(0, body_size).unwrap_or_default();
        self.replies.push((token, String::from_utf8_lossy(&body).into_owned()));
        if self.replies.len() == self.tokens.len() {
            let tokens = &self.tokens;
            self.replies.sort_by_key(|(token, _)| tokens.iter().position(|t| t == token));
            let text: Vec<&str> = self.replies.iter().map(|(_, text)| text.as_str()).collect();
            let text = text.join("|");
            self.send_http_response(200, vec![("x-by", "callouts")], Some(text.as_bytes()));
        }
    }
}

impl HttpContext for Three {
    fn on_http_request_headers(&mut self, _count: usize, _end_of_stream: bool) -> Action {
        for path in ["/slow/first", "/second", "/slow/third"] {
            self.tokens.extend(call(self, "auth", path, None));
        }
        Action::Pause
    }
}
