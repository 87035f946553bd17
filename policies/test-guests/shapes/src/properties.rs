//! What a property is on this host.

use std::fmt::Write as _;

use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::Action;

/// Properties by their dotted names, in the request and in the response phase.
#[derive(Default)]
pub struct Properties {
    names: Vec<String>,
    found: Vec<(String, String)>,
}

impl Properties {
    fn read(&mut self, phase: &str) {
        for name in self.names.clone() {
            let path = name.split('/').collect();
            let value = match self.get_property(path) {
                Some(bytes) => hexadecimal(&bytes),
                None => "absent".to_owned(),
            };
            self.found.push((format!("x-{phase}-{}", name.replace(['/', '_', '.'], "-")), value));
        }
    }
}

impl Context for Properties {}

impl HttpContext for Properties {
    fn on_http_request_headers(&mut self, _count: usize, _end_of_stream: bool) -> Action {
        let names = self.get_http_request_header("x-properties").unwrap_or_default();
        self.names = names.split(' ').filter(|name| !name.is_empty()).map(str::to_owned).collect();
        self.set_property(vec!["shapes_note"], Some(b"set by the filter"));
        self.read("request");
        Action::Continue
    }

    fn on_http_response_headers(&mut self, _count: usize, _end_of_stream: bool) -> Action {
        self.read("response");
        for (name, value) in std::mem::take(&mut self.found) {
            self.add_http_response_header(&name, &value);
        }
        Action::Continue
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
