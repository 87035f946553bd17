//! The protocols: what is asked in each, and what an answer says.

use serde_json::{Value, json};

/// A way to ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/v1/responses`
    Responses,
    /// `/v1/messages`
    Messages,
    /// `/generate`
    Generate,
}

/// What an answer, or as much of it as came, says.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// The text.
    pub text: String,
    /// The tool called, and its arguments.
    pub tool: Option<(String, String)>,
    /// The answer told that it was the whole of it.
    pub ended: bool,
    /// An error that it carried.
    pub error: Option<String>,
}

const READ_FILE: &str = "read_file";

impl Protocol {
    /// The path.
    pub fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
            Self::Generate => "/generate",
        }
    }

    /// A body that asks `said`, where there are messages after what was said before (user and assistant in turn).
    pub fn body(self, before: &[String], said: &str, stream: bool, tools: bool) -> Value {
        let messages = || {
            let all = before.iter().map(String::as_str).chain([said]).enumerate();
            let role = |place: usize| if place.is_multiple_of(2) { "user" } else { "assistant" };
            all.map(|(place, text)| json!({"role": role(place), "content": text})).collect::<Vec<Value>>()
        };
        let mut body = match self {
            Self::Chat => json!({"model": "sim", "messages": messages(), "stream": stream}),
            Self::Messages => json!({"model": "sim", "max_tokens": 4000, "messages": messages(), "stream": stream}),
            Self::Completions => json!({"model": "sim", "prompt": said, "max_tokens": 2000, "stream": stream}),
            Self::Responses => json!({"model": "sim", "input": said, "stream": stream}),
            Self::Generate => {
                json!({"text": said, "sampling_params": {"max_new_tokens": 2000}, "stream": stream})
            }
        };
        let schema = json!({"type": "object", "properties": {"path": {"type": "string"}}});
        if tools {
            body["tools"] = match self {
                Self::Chat => json!([{"type": "function", "function": {"name": READ_FILE, "parameters": schema}}]),
                Self::Messages => json!([{"name": READ_FILE, "input_schema": schema}]),
                _ => json!([{"type": "function", "name": READ_FILE, "parameters": schema}]),
            };
        }
        body
    }

    /// Reads an answer.
    pub fn read(self, body: &[u8], stream: bool) -> Reading {
        let text = String::from_utf8_lossy(body);
        let mut reading = Reading::default();
        if !stream {
            let Ok(value) = serde_json::from_str::<Value>(&text) else { return reading };
            self.read_whole(&value, &mut reading);
            return reading;
        }
        for event in text.split_inclusive("\n\n").filter(|event| event.ends_with("\n\n")) {
            let data = event.lines().find_map(|line| line.strip_prefix("data: "));
            match data {
                Some("[DONE]") => reading.ended = true,
                Some(data) => match serde_json::from_str::<Value>(data) {
                    Ok(value) => self.read_event(&value, &mut reading),
                    Err(_) => reading.error = Some(format!("an event that is no JSON: {data}")),
                },
                None => reading.error = Some(format!("no event: {event:?}")),
            }
        }
        reading
    }

    fn read_whole(self, value: &Value, reading: &mut Reading) {
        reading.error = error_of(value);
        reading.ended = reading.error.is_none();
        let string = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        match self {
            Self::Chat => {
                let message = &value["choices"][0]["message"];
                reading.text = string(&message["content"]);
                let call = &message["tool_calls"][0]["function"];
                reading.tool = call.is_object().then(|| (string(&call["name"]), string(&call["arguments"])));
            }
            Self::Completions => reading.text = string(&value["choices"][0]["text"]),
            Self::Generate => reading.text = string(&value["text"]),
            Self::Messages => {
                for block in value["content"].as_array().into_iter().flatten() {
                    reading.text.push_str(block["text"].as_str().unwrap_or_default());
                    if block["type"] == "tool_use" {
                        reading.tool = Some((string(&block["name"]), block["input"].to_string()));
                    }
                }
            }
            Self::Responses => {
                for item in value["output"].as_array().into_iter().flatten() {
                    for part in item["content"].as_array().into_iter().flatten() {
                        reading.text.push_str(part["text"].as_str().unwrap_or_default());
                    }
                    if item["type"] == "function_call" {
                        reading.tool = Some((string(&item["name"]), string(&item["arguments"])));
                    }
                }
            }
        }
    }

    fn read_event(self, value: &Value, reading: &mut Reading) {
        if let Some(error) = error_of(value) {
            reading.error = Some(error);
            return;
        }
        let string = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let kind = value["type"].as_str().unwrap_or_default();
        match self {
            Self::Chat => {
                let delta = &value["choices"][0]["delta"];
                reading.text.push_str(delta["content"].as_str().unwrap_or_default());
                let call = &delta["tool_calls"][0]["function"];
                if call.is_object() {
                    let (name, arguments) = reading.tool.get_or_insert_default();
                    name.push_str(call["name"].as_str().unwrap_or_default());
                    arguments.push_str(call["arguments"].as_str().unwrap_or_default());
                }
            }
            Self::Completions => reading.text.push_str(value["choices"][0]["text"].as_str().unwrap_or_default()),
            Self::Generate => {
                reading.text = string(&value["text"]);
                let reason = &value["meta_info"]["finish_reason"];
                if reason["type"] == "abort" {
                    reading.error = Some(string(&reason["message"]));
                }
            }
            Self::Messages => match kind {
                "content_block_start" if value["content_block"]["type"] == "tool_use" => {
                    reading.tool = Some((string(&value["content_block"]["name"]), String::new()));
                }
                "content_block_delta" => {
                    reading.text.push_str(value["delta"]["text"].as_str().unwrap_or_default());
                    if let (Some((_, arguments)), Some(part)) =
                        (&mut reading.tool, value["delta"]["partial_json"].as_str())
                    {
                        arguments.push_str(part);
                    }
                }
                "message_stop" => reading.ended = true,
                _ => {}
            },
            Self::Responses => match kind {
                "response.output_text.delta" => {
                    reading.text.push_str(value["delta"].as_str().unwrap_or_default());
                }
                "response.output_item.done" if value["item"]["type"] == "function_call" => {
                    reading.tool = Some((string(&value["item"]["name"]), string(&value["item"]["arguments"])));
                }
                "response.completed" | "response.incomplete" => reading.ended = true,
                _ => {}
            },
        }
    }
}

/// The error that a body or event carries, in whatever protocol.
fn error_of(value: &Value) -> Option<String> {
    let error = &value["error"];
    let flat = (value["object"] == "error").then_some(value);
    let error = if error.is_object() { Some(error) } else { flat };
    error.map(|error| error["message"].as_str().unwrap_or("an error without a message").to_owned())
}
