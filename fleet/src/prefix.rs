//! Prefix hashes: which prompt this is, and how much of it another prompt shares, without a tokenizer.
//!
//! The canonical prompt is the model, the cache salt and whatever the route renders, always in one order whatever the order
//! in the body, each part behind a tag. It is cut into blocks of fixed size and each block's hash is chained to the one
//! before, so that equal hashes at position `i` mean equal prompts up to there. A list of messages goes in without its closing
//! bracket: an appended message then continues the stream and all earlier blocks stay. A last, partial block is not hashed.

use xxhash_rust::xxh3::{xxh3_64_with_secret, xxh3_64_with_seed};

use crate::body::Members;
use crate::identity::Identity;
use crate::route::Route;

/// Block size used unless configured otherwise, in bytes: about 128 tokens of code or prose.
pub const DEFAULT_BLOCK_BYTES: usize = 512;

/// Most blocks hashed of one prompt unless configured otherwise: 16 MiB at the default size.
pub const DEFAULT_MAX_BLOCKS: usize = 32 * 1024;

/// How to hash prompts.
#[derive(Clone)]
pub struct PrefixOptions {
    /// Block size in bytes.
    block_bytes: usize,
    /// Blocks hashed of one prompt at most.
    max_blocks: usize,
    /// Seed of the chain.
    seed: u64,
    /// The seed spread once, so that hashing a block does not have to.
    secret: [u8; 192],
}

/// The hashes of one prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixHashes {
    /// The chained hash of every whole block.
    pub blocks: Vec<u64>,
    /// Size of a block in bytes.
    pub block_bytes: usize,
    /// Size of the prompt in bytes as the client wrote it (JSON escapes included), without model and salt.
    pub bytes: usize,
    /// What ties are broken by: the session where there is one, else the tree, else the first block. Gateways that know
    /// nothing of each other agree on it.
    pub affinity_hash: u64,
}

/// Bytes of prompt per token, as learned from what workers report.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BytesPerToken(f64);

/// Weight of one turn in the learned bytes per token.
const BYTES_PER_TOKEN_WEIGHT: f64 = 0.05;

/// Fewest tokens of a prompt that teach anything: template and tool preamble weigh too much in a tiny one.
const TEACHING_TOKENS: u64 = 32;

/// The cache namespaces of a request, as JSON and as the worker gets them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Namespaces<'a> {
    /// `cache_salt`; none where it is empty.
    pub cache_salt: Option<&'a [u8]>,
    /// `extra_key`; none where it is empty.
    pub extra_key: Option<&'a [u8]>,
}

/// Hashes the prompt of a request. Routes that do not generate have no blocks.
pub fn hash(
    route: Route,
    members: &Members,
    identity: &Identity,
    namespaces: Namespaces<'_>,
    options: &PrefixOptions,
) -> PrefixHashes {
    let mut chain = Chain::new(options);
    let mut bytes = 0;
    let named = |key| members.raw(key).filter(|raw| *raw != b"null" && *raw != b"\"\"");
    let Namespaces { cache_salt, extra_key } = namespaces;
    for (tag, raw) in [(b'm', named("model")), (b's', cache_salt), (b'x', extra_key), (b'l', named("lora_path"))] {
        chain.part(tag, raw.unwrap_or_default());
    }
    for (tag, key) in prompt_members(route, members) {
        let raw = members.raw(key).filter(|raw| *raw != b"null").unwrap_or_default();
        let open = open_ended(raw);
        bytes += open.len();
        chain.part(*tag, open);
    }
    let blocks = if route.generates() { chain.finish() } else { Vec::new() };
    let named = identity.session.as_ref().or(identity.tree.as_ref());
    let affinity_hash = match (named, blocks.first()) {
        (Some(named), _) => (named.key.0 as u64) ^ ((named.key.0 >> 64) as u64),
        (None, Some(first)) => *first,
        (None, None) => chain_short(members, route, namespaces, options),
    };
    PrefixHashes { blocks, block_bytes: options.block_bytes, bytes, affinity_hash }
}

/// The members that make up the prompt, in the order in which templates use them. The last one is the one that grows.
fn prompt_members(route: Route, members: &Members) -> &'static [(u8, &'static str)] {
    let ids = members.raw("input_ids").is_some_and(|raw| raw != b"null");
    match route {
        // Given ids, the template is not applied.
        Route::Chat | Route::Generate if ids => &[(b'i', "input_ids")],
        Route::Chat | Route::Tokenize => &[(b't', "tools"), (b'c', "messages")],
        Route::Messages | Route::CountTokens => &[(b't', "tools"), (b'y', "system"), (b'c', "messages")],
        Route::Responses => &[(b't', "tools"), (b'y', "instructions"), (b'c', "input")],
        Route::Completions => &[(b'p', "prompt")],
        Route::Generate => &[(b'p', "text")],
        Route::Embeddings => &[(b'p', "input")],
        Route::Rerank => &[(b'q', "query"), (b'p', "documents")],
        Route::Score => &[(b'q', "query"), (b'p', "items")],
        Route::Detokenize => &[(b'i', "tokens")],
    }
}

/// A list or a string without its closing bracket or quote and the white space before it, so that a longer one begins
/// with it.
fn open_ended(raw: &[u8]) -> &[u8] {
    match raw {
        [b'[', .., b']'] => raw.strip_suffix(b"]").unwrap_or(raw).trim_ascii_end(),
        [b'"', .., b'"'] => raw.strip_suffix(b"\"").unwrap_or(raw),
        _ => raw,
    }
}

/// One hash over a prompt shorter than a block.
fn chain_short(members: &Members, route: Route, namespaces: Namespaces<'_>, options: &PrefixOptions) -> u64 {
    let mut hash = options.seed;
    let prompt = prompt_members(route, members).iter().map(|(_, key)| members.raw(key));
    for raw in [members.raw("model"), namespaces.cache_salt].into_iter().chain(prompt) {
        let raw = raw.unwrap_or_default();
        let cut = raw.get(..options.block_bytes).unwrap_or(raw);
        hash = link(hash, xxh3_64_with_secret(cut, &options.secret), options.seed);
    }
    hash
}

fn link(previous: u64, block: u64, seed: u64) -> u64 {
    let mut pair = [0; 16];
    let (left, right) = pair.split_at_mut(8);
    left.copy_from_slice(&previous.to_le_bytes());
    right.copy_from_slice(&block.to_le_bytes());
    xxh3_64_with_seed(&pair, seed)
}

/// Cuts a stream of parts into blocks. A block that lies within one part is hashed in place; only a block that spans parts
/// is gathered in a buffer.
struct Chain<'o> {
    options: &'o PrefixOptions,
    gathered: Vec<u8>,
    previous: u64,
    blocks: Vec<u64>,
}

impl<'o> Chain<'o> {
    fn new(options: &'o PrefixOptions) -> Self {
        let gathered = Vec::with_capacity(options.block_bytes);
        Self { options, gathered, previous: options.seed, blocks: Vec::new() }
    }

    fn part(&mut self, tag: u8, content: &[u8]) {
        // A zero byte stands nowhere in JSON, so no content can pretend to be the next part.
        self.feed(&[0, tag]);
        self.feed(content);
    }

    fn feed(&mut self, mut content: &[u8]) {
        let size = self.options.block_bytes;
        if !self.gathered.is_empty() {
            let missing = size - self.gathered.len().min(size);
            let (head, rest) = content.split_at(missing.min(content.len()));
            self.gathered.extend_from_slice(head);
            content = rest;
            if self.gathered.len() < size {
                return;
            }
            let hash = xxh3_64_with_secret(&self.gathered, &self.options.secret);
            self.push(hash);
            self.gathered.clear();
        }
        let mut whole = content.chunks_exact(size);
        for block in whole.by_ref() {
            if self.blocks.len() >= self.options.max_blocks {
                return;
            }
            self.push(xxh3_64_with_secret(block, &self.options.secret));
        }
        self.gathered.extend_from_slice(whole.remainder());
    }

    fn push(&mut self, block: u64) {
        if self.blocks.len() < self.options.max_blocks {
            self.previous = link(self.previous, block, self.options.seed);
            self.blocks.push(self.previous);
        }
    }

    fn finish(self) -> Vec<u64> {
        self.blocks
    }
}

// === impl PrefixHashes ===

impl PrefixHashes {
    /// Tokens in so many blocks.
    pub fn tokens_of(&self, blocks: usize, bytes_per_token: f64) -> u64 {
        let bytes = (blocks * self.block_bytes) as f64;
        // `as` saturates.
        (bytes / bytes_per_token) as u64
    }

    /// Blocks that a worker had of this prompt when it reports so many cached tokens of so many; none if that says nothing.
    pub fn blocks_of(&self, cached_tokens: u64, prompt_tokens: u64) -> Option<usize> {
        if prompt_tokens == 0 || self.block_bytes == 0 {
            return None;
        }
        let bytes = self.bytes as f64 * cached_tokens as f64 / prompt_tokens as f64;
        // A block is only known to be missing when the whole of it lies beyond what was cached.
        Some((bytes / self.block_bytes as f64).ceil() as usize)
    }
}

// === impl BytesPerToken ===

impl BytesPerToken {
    /// A first guess.
    pub fn new(guess: f64) -> Self {
        Self(guess)
    }

    /// The value.
    pub fn get(self) -> f64 {
        self.0
    }

    /// A worker told how many tokens a prompt of so many bytes has.
    pub fn learn(&mut self, bytes: usize, tokens: u64) {
        if tokens < TEACHING_TOKENS {
            return;
        }
        let sample = (bytes as f64 / tokens as f64).clamp(0.25, 64.0);
        self.0 += BYTES_PER_TOKEN_WEIGHT * (sample - self.0);
    }
}

// === impl PrefixOptions ===

impl PrefixOptions {
    /// Blocks of `block_bytes` (taken as at least 64), at most `max_blocks` of them. Gateways that compare hashes share the
    /// seed and the sizes.
    pub fn new(block_bytes: usize, max_blocks: usize, seed: u64) -> Self {
        let mut secret = [0; 192];
        for (position, part) in secret.chunks_exact_mut(8).enumerate() {
            part.copy_from_slice(&xxh3_64_with_seed(&(position as u64).to_le_bytes(), seed).to_le_bytes());
        }
        Self { block_bytes: block_bytes.max(64), max_blocks, seed, secret }
    }

    /// The size of a block in bytes.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }
}

impl std::fmt::Debug for PrefixOptions {
    /// Without seed and secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PrefixOptions")
            .field("block_bytes", &self.block_bytes)
            .field("max_blocks", &self.max_blocks)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "prefix_tests.rs"]
mod tests;
