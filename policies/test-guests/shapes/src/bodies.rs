//! Bodies that are held until they are whole, and edited.

use log::info;
use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::Action;

/// How the request asks for a body to be edited.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Edit {
    #[default]
    Nothing,
    Prepend,
    Append,
    Middle,
    Replace,
    Empty,
}

impl Edit {
    fn named(name: Option<String>) -> Self {
        match name.as_deref() {
            Some("prepend") => Self::Prepend,
            Some("append") => Self::Append,
            Some("middle") => Self::Middle,
            Some("replace") => Self::Replace,
            Some("empty") => Self::Empty,
            _ => Self::Nothing,
        }
    }

    /// Start, length and the bytes that take their place.
    fn of(self, size: usize) -> Option<(usize, usize, &'static [u8])> {
        Some(match self {
            Self::Nothing => return None,
            Self::Prepend => (0, 0, b" \n "),
            Self::Append => (size, 0, b"\n \n"),
            Self::Middle => (12, 3, b"[in its place]"),
            Self::Replace => (0, size, b"{\"model\":\"m\",\"prompt\":\"replaced\"}"),
            Self::Empty => (0, size, b""),
        })
    }
}

/// The request's body.
#[derive(Default)]
pub struct RequestBody {
    edit: Edit,
}

impl Context for RequestBody {}

impl HttpContext for RequestBody {
    fn on_http_request_headers(&mut self, _count: usize, end_of_stream: bool) -> Action {
        info!("request-body: headers, end {end_of_stream}");
        self.edit = Edit::named(self.get_http_request_header("x-edit"));
        if self.edit != Edit::Nothing {
            self.set_http_request_header("content-length", None);
        }
        Action::Continue
    }

    fn on_http_request_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        if !end_of_stream {
            return Action::Pause;
        }
        let held = self.get_http_request_body(0, usize::MAX >> 1).unwrap_or_default();
        info!(
            "request-body: whole, size right {}, first bytes {:?}",
            held.len() == size,
            held.get(..4.min(held.len()))
        );
        let beyond = self.get_http_request_body(size + 10, 5);
        info!("request-body: beyond the end {:?}", beyond.map(|bytes| bytes.len()));
        if let Some((start, length, bytes)) = self.edit.of(size) {
            self.set_http_request_body(start, length, bytes);
        }
        Action::Continue
    }
}

/// The response's body.
#[derive(Default)]
pub struct ResponseBody {
    edit: Edit,
}

impl Context for ResponseBody {}

impl HttpContext for ResponseBody {
    fn on_http_request_headers(&mut self, _count: usize, _end_of_stream: bool) -> Action {
        self.edit = Edit::named(self.get_http_request_header("x-edit"));
        Action::Continue
    }

    fn on_http_response_headers(&mut self, _count: usize, end_of_stream: bool) -> Action {
        info!("response-body: headers, end {end_of_stream}");
        if self.edit != Edit::Nothing {
            self.set_http_response_header("content-length", None);
        }
        Action::Continue
    }

    fn on_http_response_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        if !end_of_stream {
            return Action::Pause;
        }
        let held = self.get_http_response_body(0, usize::MAX >> 1).unwrap_or_default();
        info!("response-body: whole, size right {}", held.len() == size);
        if let Some((start, length, bytes)) = self.edit.of(size) {
            self.set_http_response_body(start, length, bytes);
        }
        Action::Continue
    }
}
