//! What the model answers: a deterministic text, which a request can script.
//!
//! Directives stand in the last user message (in the prompt text for completions and `/generate`), as many as wanted:
//!
//! | directive | effect |
//! | --- | --- |
//! | `[[sim:tokens=N]]` | the answer has N tokens, its end marker included |
//! | `[[sim:think=N]]` | N reasoning tokens come first, both markers included |
//! | `[[sim:text=WORDS]]` | the answer is WORDS |
//! | `[[sim:tool=NAME {"a":1}]]` | the answer ends with this tool call (and has no text unless `tokens` or `text` is given) |
//!
//! Without directives the text comes from a hash of the prompt and the seed, so the same prompt gives the same answer on
//! every worker, of between a half and the whole of `default_output_tokens`.

use crate::{
    config::SimConfig,
    pytext, template,
    tokenizer::{Decoder, Special, TokenId, decode, encode},
};
use serde_json::Value;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Reasoning tokens of a reasoning model when no directive says otherwise.
const DEFAULT_THINK_TOKENS: usize = 16;

const WORDS: [&str; 48] = [
    "the", "file", "test", "we", "change", "value", "then", "result", "looks", "right", "a", "function", "returns",
    "error", "when", "input", "is", "empty", "so", "next", "step", "should", "read", "module", "and", "check", "that",
    "build", "passes", "again", "first", "line", "of", "output", "shows", "one", "more", "case", "to", "handle", "in",
    "parser", "with", "this", "we", "keep", "old", "path",
];

/// What the directives of a prompt ask for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Script {
    /// Answer length in tokens, the end marker included.
    pub tokens: Option<usize>,
    /// Reasoning length in tokens, both markers included; 0 is none.
    pub think: Option<usize>,
    /// Exact answer text.
    pub text: Option<String>,
    /// Tool calls: name and arguments.
    pub tools: Vec<(String, Value)>,
}

impl Script {
    /// Reads the directives in `prompt`; what is not understood is ignored.
    pub fn parse(prompt: &str) -> Self {
        let mut script = Self::default();
        let mut rest = prompt;
        while let Some((_, tail)) = rest.split_once("[[sim:") {
            rest = tail;
            let plain = tail.split_once("]]").map(|(inner, _)| inner).unwrap_or_default();
            if let Some(count) = plain.strip_prefix("tokens=") {
                script.tokens = count.trim().parse().ok();
            } else if let Some(count) = plain.strip_prefix("think=") {
                script.think = count.trim().parse().ok();
            } else if let Some(text) = plain.strip_prefix("text=") {
                script.text = Some(text.to_owned());
            } else if let Some(call) = tail.strip_prefix("tool=") {
                // The arguments may hold "]]" themselves, so they are read as JSON first.
                let (name, arguments) = call.split_once([' ', ']']).unwrap_or((call, ""));
                let arguments = serde_json::Deserializer::from_str(arguments)
                    .into_iter::<Value>()
                    .next()
                    .and_then(Result::ok)
                    .filter(Value::is_object);
                script
                    .tools
                    .push((name.trim().to_owned(), arguments.unwrap_or_else(|| Value::Object(Default::default()))));
            }
        }
        script
    }
}

/// How an output ends by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The end marker was produced (its id).
    EndToken(TokenId),
    /// A stop string was produced; it is not part of the text.
    StopText(String),
    /// The length limit was reached.
    Length,
}

/// A whole output, known in advance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Every output token, the end marker included.
    pub ids: Vec<TokenId>,
    /// How it ends.
    pub ending: Ending,
    /// How many of the first tokens are reasoning.
    pub reasoning_tokens: usize,
}

/// Limits of one output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Most output tokens.
    pub max_new_tokens: usize,
    /// Go on until `max_new_tokens`.
    pub ignore_eos: bool,
    /// Stop strings.
    pub stop: Vec<String>,
}

/// Plans the answer to `prompt`.
pub fn plan(config: &SimConfig, prompt: &[TokenId], script: &Script, limits: &Limits) -> Plan {
    let bytes: Vec<u8> = prompt.iter().flat_map(|id| id.to_le_bytes()).collect();
    let seed = xxh3_64_with_seed(&bytes, config.seed);
    let think = script.think.unwrap_or(if config.reasoning { DEFAULT_THINK_TOKENS } else { 0 });
    let mut text = String::new();
    if think > 0 {
        text.push_str("<think>");
        text.push_str(&words(seed ^ 1, think.saturating_sub(2)));
        text.push_str("</think>");
    }
    let reasoning_tokens = if think > 0 { think.max(2) } else { 0 };
    let answer_tokens = match (&script.tokens, limits.ignore_eos) {
        (_, true) => limits.max_new_tokens.saturating_sub(reasoning_tokens) + 1,
        (Some(tokens), false) => *tokens,
        (None, false) if !script.tools.is_empty() => 1,
        (None, false) => {
            let most = config.default_output_tokens.max(2);
            most - usize::try_from(xxh3_64(&seed.to_le_bytes())).unwrap_or_default() % (most / 2)
        }
    };
    let answer = script.text.clone().unwrap_or_else(|| words(seed, answer_tokens.saturating_sub(1)));
    text.push_str(&answer);
    for (place, (name, arguments)) in script.tools.iter().enumerate() {
        if place > 0 || !answer.is_empty() {
            text.push('\n');
        }
        text.push_str(&template::tool_call_text(name, &pytext::json(arguments)));
    }
    let mut ids = encode(&text);
    if limits.ignore_eos {
        // A text shorter than asked for goes on with more words.
        let missing = limits.max_new_tokens.saturating_sub(ids.len());
        ids.extend(encode(&words(seed ^ 2, missing)));
    } else {
        ids.push(Special::ImEnd.id());
    }
    finish(ids, reasoning_tokens, limits)
}

impl Plan {
    /// These tokens, as many as are allowed; at least one.
    pub fn exact(mut ids: Vec<TokenId>, most: usize) -> Self {
        let cut = ids.len() > most;
        ids.truncate(most.max(1));
        if ids.is_empty() {
            ids.push(Special::ImEnd.id());
        }
        let ending = match ids.last() {
            Some(last) if !cut => Ending::EndToken(*last),
            _ => Ending::Length,
        };
        Self { ids, ending, reasoning_tokens: 0 }
    }
}

fn finish(mut ids: Vec<TokenId>, reasoning_tokens: usize, limits: &Limits) -> Plan {
    let mut ending = Ending::EndToken(Special::ImEnd.id());
    if limits.ignore_eos || ids.len() > limits.max_new_tokens {
        ids.truncate(limits.max_new_tokens);
        ending = Ending::Length;
    }
    if !limits.stop.is_empty() {
        let (mut decoder, mut text) = (Decoder::default(), String::new());
        for (place, id) in ids.iter().enumerate() {
            text.push_str(&decoder.push(*id));
            let hit = limits.stop.iter().find(|stop| !stop.is_empty() && text.contains(stop.as_str()));
            if let Some(stop) = hit {
                ids.truncate(place + 1);
                ending = Ending::StopText(stop.clone());
                break;
            }
        }
    }
    let reasoning_tokens = reasoning_tokens.min(ids.len());
    Plan { ids, ending, reasoning_tokens }
}

/// A text of exactly `tokens` tokens.
fn words(seed: u64, tokens: usize) -> String {
    let mut state = seed | 1;
    let mut text = String::new();
    let mut sentence = 0;
    // A word with its space is at least one token.
    for place in 0..tokens {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let choice = usize::try_from(state >> 33).unwrap_or_default();
        let word = WORDS.get(choice % WORDS.len()).copied().unwrap_or("the");
        if place > 0 {
            text.push(' ');
        }
        text.push_str(word);
        sentence += 1;
        if sentence > 6 + choice % 9 {
            text.push('.');
            sentence = 0;
        }
    }
    let mut ids = encode(&text);
    ids.truncate(tokens);
    decode(&ids)
}

#[cfg(test)]
#[path = "output_tests.rs"]
mod tests;
