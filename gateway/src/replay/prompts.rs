//! From what the log says of prompts to sequences of tokens that share what the prompts shared.
//!
//! A block gets its tokens with the first prompt that has it, by its share of that prompt's bytes, so that every prompt is as
//! long as its worker said, or nearly so. What stands behind the last whole block is a prompt's own, with one exception: a turn
//! that goes on where the turn before it in its session ended also shares that turn's last tokens and its answer, as far as the
//! cached tokens that its worker reported go beyond the whole blocks. Where nothing was reported, as far as in half of the turns
//! that did report something.

use super::blocks::{Blocks, NONE};
use super::log::{Entry, MAX_TOKENS};
use super::tokens::{EMPTY, Sequences};
use hashbrown::HashMap;
use turnstile_fleet::cost::mix;

/// A prompt and the answer to it.
#[derive(Debug, Clone, Copy)]
pub struct Prompt {
    /// Its tokens.
    pub sequence: u32,
    /// Its tokens and those of the answer.
    pub with_answer: u32,
    /// Its last whole block.
    pub leaf: u32,
    /// Bytes that it counts as.
    pub bytes: u64,
    /// Tokens that a cache without bound would have had of it.
    pub ideal_cached: u64,
}

/// Sequences of all prompts.
#[derive(Debug, Default)]
pub struct Prompts {
    /// The tokens.
    pub sequences: Sequences,
    /// The prompts, turn by turn.
    pub list: Vec<Prompt>,
    /// Turns that brought only what was new to their streaming session: they are played with their history.
    pub deltas: u64,
}

/// Where a block ends in the sequences.
#[derive(Debug, Clone, Copy)]
struct End {
    sequence: u32,
    tokens: u64,
}

struct Builder<'a> {
    blocks: &'a mut Blocks,
    ends: HashMap<u32, End>,
    prompts: Prompts,
    /// The last turn of each session.
    last: HashMap<&'a str, Prompt>,
    /// Share of the last answer that is found again where nobody told.
    usual_share: f64,
}

/// Lays out the prompts of all entries, in their order.
pub fn lay_out(entries: &[Entry], blocks: &mut Blocks) -> Prompts {
    let usual_share = usual_share(entries, blocks);
    let mut builder =
        Builder { blocks, ends: HashMap::new(), prompts: Prompts::default(), last: HashMap::new(), usual_share };
    for (number, entry) in (0_u64..).zip(entries) {
        builder.add(number, entry);
    }
    builder.prompts
}

/// Tokens of a prompt: as reported, else by the usual number of bytes.
fn prompt_tokens(entry: &Entry) -> u64 {
    entry.line.prompt_tokens.unwrap_or(entry.line.prompt_bytes / 4).clamp(1, MAX_TOKENS)
}

fn answer_tokens(entry: &Entry) -> u64 {
    entry.line.completion_tokens.unwrap_or(1).clamp(1, MAX_TOKENS)
}

fn is_delta(entry: &Entry) -> bool {
    entry.line.mode.as_deref() == Some("stream")
}

/// How much of what came behind the whole blocks was found again, in the middle of the turns that go on with their session and
/// tell that more than the whole blocks was cached.
fn usual_share(entries: &[Entry], blocks: &Blocks) -> f64 {
    let mut last: HashMap<&str, &Entry> = HashMap::new();
    let mut shares = Vec::new();
    for entry in entries.iter().filter(|entry| !is_delta(entry)) {
        let Some(session) = entry.line.session.as_deref() else { continue };
        let before = last.insert(session, entry);
        let (Some(before), Some(cached)) = (before, entry.line.cached_tokens) else { continue };
        if !blocks.path(entry.leaf).any(|block| block == before.leaf) && before.leaf != NONE {
            continue;
        }
        let bytes = u64::from(blocks.depth(before.leaf)) * u64::from(before.line.block_bytes);
        let whole = (prompt_tokens(before) as f64 * bytes as f64 / before.line.prompt_bytes.max(1) as f64) as u64;
        let more = (prompt_tokens(before) + answer_tokens(before)).saturating_sub(whole + 1);
        if cached > whole && more > 0 {
            shares.push(((cached - whole) as f64 / more as f64).min(1.0));
        }
    }
    shares.sort_by(f64::total_cmp);
    shares.get(shares.len() / 2).copied().unwrap_or(0.0)
}

impl<'a> Builder<'a> {
    fn add(&mut self, number: u64, entry: &'a Entry) {
        let session = entry.line.session.as_deref();
        let before = session.and_then(|session| self.last.get(session)).copied();
        let prompt = match before {
            Some(before) if is_delta(entry) => self.delta(number, entry, before),
            _ => self.whole(number, entry, before),
        };
        if let Some(session) = session {
            self.last.insert(session, prompt);
        }
        self.prompts.list.push(prompt);
    }

    /// A prompt that stands in its request as a whole.
    fn whole(&mut self, number: u64, entry: &Entry, before: Option<Prompt>) -> Prompt {
        let path: Vec<u32> = self.blocks.path(entry.leaf).collect();
        // The new blocks, the last first, and where the known ones end.
        let new: Vec<u32> = path.iter().copied().take_while(|block| !self.ends.contains_key(block)).collect();
        let base = path.get(new.len()).copied().unwrap_or(NONE);
        let known = self.ends.get(&base).copied().unwrap_or(End { sequence: EMPTY, tokens: 0 });

        let follows = before.filter(|before| before.leaf == base);
        let shared = follows.map_or(known, |before| self.shared(entry, before, known));
        let tokens = prompt_tokens(entry).max(shared.tokens);
        let seed = mix(self.blocks.hash(entry.leaf) ^ mix(session_seed(entry, number) ^ entry.line.prompt_bytes));
        let sequence = self.fill(entry.line.prompt_bytes, entry.line.block_bytes, &new, known, shared, tokens, seed);
        self.finish(number, entry, sequence, entry.leaf, entry.line.prompt_bytes, shared.tokens)
    }

    /// What a turn shares with the one before it beyond whole blocks.
    fn shared(&mut self, entry: &Entry, before: Prompt, known: End) -> End {
        let all = self.prompts.sequences.len(before.with_answer);
        let most = all.saturating_sub(1).min(prompt_tokens(entry)).max(known.tokens);
        let tokens = match entry.line.cached_tokens {
            Some(cached) if cached > known.tokens => cached.min(most),
            _ => known.tokens + ((most - known.tokens) as f64 * self.usual_share) as u64,
        };
        End { sequence: self.prompts.sequences.cut(before.with_answer, tokens), tokens }
    }

    /// Gives the new blocks their tokens; returns the whole sequence.
    #[allow(clippy::too_many_arguments)]
    fn fill(
        &mut self,
        bytes: u64,
        block_bytes: u32,
        new: &[u32],
        known: End,
        shared: End,
        tokens: u64,
        seed: u64,
    ) -> u32 {
        let known_blocks = new.last().map_or(0, |first| self.blocks.depth(*first).saturating_sub(1));
        let left_bytes = bytes.saturating_sub(u64::from(known_blocks) * u64::from(block_bytes)).max(1);
        let left_tokens = tokens - known.tokens;
        let mut at = shared;
        for &block in new.iter().rev() {
            let blocks = u64::from(self.blocks.depth(block) - known_blocks);
            let share = (blocks * u64::from(block_bytes)) as f64 / left_bytes as f64;
            // The tags between the parts of a prompt are no bytes of it, so the last block may end a little behind it.
            let end = known.tokens + ((left_tokens as f64 * share.min(1.0)) as u64).min(left_tokens);
            let sequences = &mut self.prompts.sequences;
            let sequence = if end <= shared.tokens {
                sequences.cut(shared.sequence, end)
            } else {
                let more = end - at.tokens.min(end);
                at = End {
                    sequence: sequences.append(at.sequence, mix(self.blocks.hash(block)), more),
                    tokens: end.max(at.tokens),
                };
                at.sequence
            };
            self.ends.insert(block, End { sequence, tokens: end });
        }
        self.prompts.sequences.append(at.sequence, seed, tokens - at.tokens)
    }

    /// A turn that brings only what is new to its streaming session: its history is put before it.
    fn delta(&mut self, number: u64, entry: &Entry, before: Prompt) -> Prompt {
        self.prompts.deltas += 1;
        let history = End { sequence: before.with_answer, tokens: self.prompts.sequences.len(before.with_answer) };
        let answer = history.tokens - self.prompts.sequences.len(before.sequence);
        let per_token = before.bytes as f64 / self.prompts.sequences.len(before.sequence).max(1) as f64;
        let bytes = before.bytes + (answer as f64 * per_token) as u64 + entry.line.prompt_bytes;
        let tokens = prompt_tokens(entry).max(history.tokens + 1);
        let mut new = Vec::new();
        let mut leaf = before.leaf;
        let block_bytes = u64::from(entry.line.block_bytes);
        for n in u64::from(self.blocks.depth(before.leaf))..bytes / block_bytes {
            leaf = self.blocks.child(leaf, mix(session_seed(entry, number) ^ mix(n ^ mix(number))));
            new.push(leaf);
        }
        new.reverse();
        let known = self.ends.get(&before.leaf).copied().unwrap_or(End { sequence: EMPTY, tokens: 0 });
        let seed = mix(session_seed(entry, number) ^ mix(number));
        let sequence = self.fill(bytes, entry.line.block_bytes, &new, known, history, tokens, seed);
        self.finish(number, entry, sequence, leaf, bytes, history.tokens.saturating_sub(1))
    }

    fn finish(&mut self, number: u64, entry: &Entry, sequence: u32, leaf: u32, bytes: u64, shared: u64) -> Prompt {
        let sequences = &mut self.prompts.sequences;
        let with_answer = sequences.append(sequence, mix(!number), answer_tokens(entry));
        // The last token of a prompt is always computed.
        let ideal_cached = shared.min(sequences.len(sequence).saturating_sub(1));
        Prompt { sequence, with_answer, leaf, bytes, ideal_cached }
    }
}

/// Makes what is a prompt's own the same for the turns of a session that repeat it, and nobody else's.
fn session_seed(entry: &Entry, number: u64) -> u64 {
    match &entry.line.session {
        Some(session) => xxhash_rust::xxh3::xxh3_64(session.as_bytes()),
        None => mix(number),
    }
}

#[cfg(test)]
#[path = "prompts_tests.rs"]
mod tests;
