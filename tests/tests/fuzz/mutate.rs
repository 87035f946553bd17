//! Mutations of a corpus: a few small changes at a time, the same in every run.

/// Longest input made.
const MAX_BYTES: usize = 8 * 1024;

/// An endless stream of mutated inputs.
pub struct Mutations<'a> {
    corpus: &'a [Vec<u8>],
    words: &'a [Vec<u8>],
    state: u64,
}

/// The words of a libFuzzer dictionary.
pub fn words(dictionary: &str) -> Vec<Vec<u8>> {
    let lines = dictionary.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(|line| word(line).unwrap_or_else(|| panic!("not a dictionary line: {line}"))).collect()
}

/// `"text"` with `\\`, `\"` and `\xNN`.
fn word(line: &str) -> Option<Vec<u8>> {
    let mut rest = line.strip_prefix('"')?.strip_suffix('"')?.as_bytes();
    let mut word = Vec::new();
    while let Some((first, behind)) = rest.split_first() {
        rest = behind;
        match (first, behind) {
            (b'"', _) => return None,
            (b'\\', [escaped @ (b'\\' | b'"'), behind @ ..]) => {
                word.push(*escaped);
                rest = behind;
            }
            (b'\\', [b'x', digits @ ..]) => {
                let (digits, behind) = digits.split_at_checked(2)?;
                word.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
                rest = behind;
            }
            (b'\\', _) => return None,
            (plain, _) => word.push(*plain),
        }
    }
    Some(word)
}

// === impl Mutations ===

impl<'a> Mutations<'a> {
    /// Both lists have at least one element.
    pub fn new(corpus: &'a [Vec<u8>], words: &'a [Vec<u8>]) -> Self {
        Self { corpus, words, state: 0x9e37_79b9_7f4a_7c15 }
    }

    /// A number below `limit`, which is not 0 (xorshift64*).
    fn below(&mut self, limit: usize) -> usize {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        (self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % limit
    }

    fn change(&mut self, input: &mut Vec<u8>) {
        let at = self.below(input.len() + 1);
        let to = (at + 1 + self.below(16)).min(input.len());
        match self.below(8) {
            0 if at < input.len() => input[at] ^= 1 << self.below(8),
            1 if at < input.len() => input[at] = self.below(256) as u8,
            2 => drop(input.drain(at..to)),
            3 => {
                let again = input[at..to].to_vec();
                input.splice(at..at, again);
            }
            4 => input.truncate(at),
            5 => {
                // The rest of another input.
                let (index, corpus) = (self.below(self.corpus.len()), self.corpus);
                let other = &corpus[index];
                let from = self.below(other.len() + 1);
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
            _ => {
                let word = self.words[self.below(self.words.len())].clone();
                input.splice(at..at, word);
            }
        }
        input.truncate(MAX_BYTES);
    }
}

impl Iterator for Mutations<'_> {
    type Item = Vec<u8>;

    fn next(&mut self) -> Option<Vec<u8>> {
        let mut input = self.corpus[self.below(self.corpus.len())].clone();
        for _ in 0..1 + self.below(4) {
            self.change(&mut input);
        }
        Some(input)
    }
}
