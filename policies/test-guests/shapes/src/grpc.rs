//! A gRPC call to the upstream `grpc`.

use std::time::Duration;

use log::info;
use proxy_wasm::hostcalls;
use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::Action;

/// The reply's first byte is the verdict.
pub struct Verdict;

impl Context for Verdict {
    fn on_grpc_call_response(&mut self, _token: u32, status: u32, size: usize) {
        info!("grpc: status {status}, size {size}");
        if status != 0 {
            let (code, text) = hostcalls::get_grpc_status().unwrap_or((0, None));
            info!("grpc: code {code}, text {text:?}");
            self.send_http_response(503, vec![("x-by", "grpc")], Some(b"no verdict\n"));
            return;
        }
        let body = self.get_grpc_call_response_body(0, size).unwrap_or_default();
        if body.first() == Some(&b'y') {
            self.add_http_request_header("x-verdict", "yes");
            self.resume_http_request();
        } else {
            self.send_http_response(403, vec![("x-by", "grpc")], Some(b"not allowed\n"));
        }
    }
}

impl HttpContext for Verdict {
    fn on_http_request_headers(&mut self, _count: usize, _end_of_stream: bool) -> Action {
        let method = self.get_http_request_header("x-ask").unwrap_or_else(|| "Yes".to_owned());
        let asked = self.dispatch_grpc_call(
            "grpc",
            "shapes.Verdicts",
            &method,
            vec![("x-asked-by", b"shapes")],
            Some(b"question"),
            Duration::from_millis(500),
        );
        if let Err(status) = asked {
            info!("grpc: refused at once, {status:?}");
            self.send_http_response(500, vec![("x-by", "grpc")], Some(b"no call\n"));
        }
        Action::Pause
    }
}
