//! What the reasoning and tool-call parsers make of the output tokens.

use crate::{
    config::SimConfig,
    pytext,
    tokenizer::{Decoder, Special, TokenId},
};
use serde_json::Value;

/// Characters of one tool-call argument delta.
const ARGUMENT_CHUNK: usize = 16;

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Piece {
    Reasoning(String),
    Text(String),
    /// A tool call begins: its place and its name.
    Call(usize, String),
    /// Arguments of the call at this place go on.
    Arguments(usize, String),
}

/// Holds back text that may be the beginning of a stop string, and drops what follows one.
#[derive(Debug, Default)]
pub(super) struct StopGuard {
    stops: Vec<String>,
    held: String,
    stopped: bool,
}

impl StopGuard {
    pub(super) fn new(stops: &[String]) -> Self {
        Self { stops: stops.iter().filter(|stop| !stop.is_empty()).cloned().collect(), ..Self::default() }
    }

    /// The text that is safe to give out.
    pub(super) fn push(&mut self, text: &str) -> String {
        if self.stopped {
            return String::new();
        }
        self.held.push_str(text);
        let hit = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        if let Some(at) = hit {
            self.stopped = true;
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let starts = self.held.char_indices().map(|(at, _)| at);
        let risky =
            |at: &usize| self.held.get(*at..).is_some_and(|rest| self.stops.iter().any(|stop| stop.starts_with(rest)));
        let keep = starts.into_iter().find(risky).unwrap_or(self.held.len());
        let rest = self.held.split_off(keep);
        std::mem::replace(&mut self.held, rest)
    }

    /// What was held back, when the output has ended.
    pub(super) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Turns the tokens of one output into pieces.
#[derive(Debug, Default)]
pub(super) struct Pieces {
    reasoning_parser: bool,
    tool_parser: bool,
    decoder: Decoder,
    thinking: bool,
    /// Tokens of a tool call that is not complete.
    call: Option<String>,
    calls: usize,
    /// A line end that may belong to the tool call after it.
    held: String,
    guard: StopGuard,
}

impl Pieces {
    /// `tools`: the request may call tools.
    pub(super) fn new(config: &SimConfig, tools: bool, stops: &[String]) -> Self {
        Self {
            reasoning_parser: config.reasoning,
            tool_parser: tools && config.tool_call_parser,
            guard: StopGuard::new(stops),
            ..Self::default()
        }
    }

    fn text(&mut self, text: &str) -> Vec<Piece> {
        let text = self.guard.push(text);
        if text.is_empty() { Vec::new() } else { vec![Piece::Text(text)] }
    }

    /// The pieces that one more token completes.
    pub(super) fn push(&mut self, id: TokenId) -> Vec<Piece> {
        if self.reasoning_parser && id == Special::ThinkStart.id() {
            self.thinking = true;
            return Vec::new();
        }
        if self.thinking && id == Special::ThinkEnd.id() {
            self.thinking = false;
            return Vec::new();
        }
        if self.tool_parser && id == Special::ToolStart.id() {
            self.held.clear();
            self.call = Some(String::new());
            return Vec::new();
        }
        if self.call.is_some() && id == Special::ToolEnd.id() {
            return self.complete_call();
        }
        let text = self.decoder.push(id);
        if let Some(call) = &mut self.call {
            call.push_str(&text);
            return Vec::new();
        }
        if text.is_empty() {
            return Vec::new();
        }
        if self.thinking {
            return vec![Piece::Reasoning(text)];
        }
        let text = std::mem::take(&mut self.held) + &text;
        if self.tool_parser && text == "\n" {
            self.held = text;
            return Vec::new();
        }
        self.text(&text)
    }

    /// What is left when the output has ended.
    pub(super) fn finish(&mut self) -> Vec<Piece> {
        let cut_call = self.call.take().map(|call| format!("<tool_call>{call}")).unwrap_or_default();
        let rest = std::mem::take(&mut self.held) + &cut_call;
        let rest = if self.calls > 0 { String::new() } else { self.guard.push(&rest) };
        let rest = rest + &self.guard.finish();
        if rest.is_empty() { Vec::new() } else { vec![Piece::Text(rest)] }
    }

    /// True once a tool call is complete.
    pub(super) fn called(&self) -> bool {
        self.calls > 0
    }

    fn complete_call(&mut self) -> Vec<Piece> {
        let call = self.call.take().unwrap_or_default();
        let Ok(parsed) = serde_json::from_str::<Value>(call.trim()) else {
            return self.text(&format!("<tool_call>{call}</tool_call>"));
        };
        let place = self.calls;
        self.calls += 1;
        let name = parsed.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
        let arguments = parsed.get("arguments").map(pytext::json).unwrap_or_else(|| "{}".to_owned());
        let characters: Vec<char> = arguments.chars().collect();
        let parts = characters.chunks(ARGUMENT_CHUNK).map(|part| Piece::Arguments(place, part.iter().collect()));
        std::iter::once(Piece::Call(place, name)).chain(parts).collect()
    }
}

/// A whole answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Answer {
    pub reasoning: String,
    pub text: String,
    /// Name and arguments of each tool call.
    pub calls: Vec<(String, String)>,
}

impl Answer {
    pub(super) fn add(&mut self, pieces: Vec<Piece>) {
        for piece in pieces {
            match piece {
                Piece::Reasoning(text) => self.reasoning.push_str(&text),
                Piece::Text(text) => self.text.push_str(&text),
                Piece::Call(_, name) => self.calls.push((name, String::new())),
                Piece::Arguments(_, text) => {
                    if let Some((_, arguments)) = self.calls.last_mut() {
                        arguments.push_str(&text);
                    }
                }
            }
        }
    }
}
