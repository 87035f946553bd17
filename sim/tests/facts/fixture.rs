//! Raw exchanges with a real server, and how two answers are compared.
//!
//! Compared are the status, the header names, and the shape of the body: keys and their order, texts that mean something,
//! nulls. Ids, times, numbers and generated text are not.

use crate::client::{self, Answer};
use serde_json::{Value, json};
use turnstile_sim::SimWorker;

/// Texts that differ from run to run.
const FREE_TEXT: [&str; 15] = [
    "id",
    "content",
    "text",
    "reasoning_content",
    "arguments",
    "partial_json",
    "thinking",
    "delta",
    "item_id",
    "timestamp",
    "model_path",
    "tokenizer_path",
    "name",
    "load_format",
    "root",
];

/// Keys that `--enable-metrics` adds, and times that come with some chunks only.
const METRICS_ONLY: [&str; 11] = [
    "storage_prefetch_wait",
    "storage_staging_wait",
    "forward_entry_time",
    "prefill_finished_time",
    "queue_time",
    "request_received_ts",
    "first_token_latency",
    "api_server_dispatch_finish_ts",
    "request_finished_ts",
    "decode_throughput",
    "response_sent_to_client_ts",
];

/// One exchange.
pub struct Fixture {
    name: String,
    method: String,
    path: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    answer: Answer,
}

impl Fixture {
    pub fn read(name: &str) -> Self {
        let path = format!("{}/fixtures/{name}.txt", env!("CARGO_MANIFEST_DIR"));
        let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        let text = String::from_utf8_lossy(&bytes).replace("\r\n", "\n");
        let (request, response) = text.split_once("\n<<< RESPONSE (chunked framing removed)\n").unwrap();
        let request = request.split_once(">>> REQUEST\n").unwrap().1;
        let (head, body) = request.split_once("\n\n").unwrap_or((request, ""));
        let mut lines = head.lines();
        let mut first = lines.next().unwrap().split(' ');
        let (method, path) = (first.next().unwrap().to_owned(), first.next().unwrap().to_owned());
        let own = ["host", "connection", "content-length"];
        let headers = lines
            .filter_map(|line| line.split_once(": "))
            .filter(|(name, _)| !own.contains(&name.to_ascii_lowercase().as_str()))
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        let (head, answer_body) = response.split_once("\n\n").unwrap_or((response, ""));
        let mut lines = head.lines();
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let answer_headers = lines
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
            .collect();
        let answer = Answer {
            status,
            headers: answer_headers,
            body: answer_body.trim_end().as_bytes().to_vec(),
            complete: true,
        };
        Self {
            name: name.to_owned(),
            method,
            path,
            headers,
            body: body.trim_end_matches('\n').as_bytes().to_vec(),
            answer,
        }
    }

    /// Sends the recorded request to a simulated worker.
    pub async fn ask(&self, worker: &SimWorker) -> Answer {
        let headers: Vec<(&str, &str)> =
            self.headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        client::send(worker.addr(), &self.method, &self.path, &headers, &self.body).await
    }

    /// Compares an answer with the recorded one; `except` names keys whose values may differ.
    pub fn compare(&self, answer: &Answer, except: &[&str]) {
        let name = &self.name;
        assert_eq!(answer.status, self.answer.status, "{name}: {}", answer.text());
        let names = |answer: &Answer| {
            let mut names: Vec<String> = answer.headers.iter().map(|(name, _)| name.clone()).collect();
            names.sort();
            names
        };
        assert_eq!(names(answer), names(&self.answer), "{name}");
        assert_eq!(answer.header("content-type"), self.answer.header("content-type"), "{name}");
        assert!(answer.complete, "{name}");
        let (ours, real) = (shapes(&answer.text(), except), shapes(&self.answer.text(), except));
        assert_eq!(ours, real, "{name}\nours: {}\nreal: {}", answer.text(), self.answer.text());
    }
}

/// The shape of a body: of each event for a stream, repeated ones once.
fn shapes(body: &str, except: &[&str]) -> Vec<Value> {
    let body = body.trim_end();
    let lines: Vec<&str> = if body.starts_with("data: ") || body.starts_with("event: ") {
        body.lines().filter(|line| !line.is_empty()).collect()
    } else {
        vec![body]
    };
    let mut shapes: Vec<Value> = lines
        .iter()
        .map(|line| {
            let (prefix, json) = line.split_once("data: ").map_or(("", *line), |(_, json)| ("data: ", json));
            match serde_json::from_str::<Value>(json) {
                Ok(value) => json!([prefix, shape("", &value, except)]),
                Err(_) => json!([prefix, json]),
            }
        })
        .collect();
    // Of a run of deltas one is left; named events come in pairs.
    for width in [1, 2] {
        let mut place = 0;
        while place + 2 * width <= shapes.len() {
            if shapes[place..place + width] == shapes[place + width..place + 2 * width] {
                shapes.drain(place..place + width);
            } else {
                place += 1;
            }
        }
    }
    shapes
}

fn shape(key: &str, value: &Value, except: &[&str]) -> Value {
    if except.contains(&key) {
        return json!("any");
    }
    match value {
        Value::Number(_) => json!("number"),
        Value::String(_) if FREE_TEXT.contains(&key) => json!("text"),
        // A made-up session id is a bare text.
        Value::String(text) if text.len() == 32 && text.chars().all(|digit| digit.is_ascii_hexdigit()) => json!("hex"),
        // Token counts stand in the middle of messages.
        Value::String(text) if key == "message" => {
            let mut out = String::new();
            for part in text.split_inclusive(|character: char| !character.is_ascii_digit()) {
                let end = part.trim_start_matches(|character: char| character.is_ascii_digit());
                out.push_str(if end.len() < part.len() { "#" } else { "" });
                out.push_str(end);
            }
            json!(out)
        }
        Value::Array(items) => {
            let mut shapes: Vec<Value> = items.iter().map(|item| shape("", item, except)).collect();
            shapes.dedup();
            Value::Array(shapes)
        }
        // The order of the keys counts, so an object becomes a list.
        Value::Object(fields) => fields
            .iter()
            .filter(|(key, _)| !METRICS_ONLY.contains(&key.as_str()))
            .map(|(key, value)| json!([key, shape(key, value, except)]))
            .collect(),
        other => other.clone(),
    }
}
