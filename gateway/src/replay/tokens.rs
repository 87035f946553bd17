//! Tokens that stand for prompts of which only hashes are known.
//!
//! A prompt is a list of segments; token `n` of a segment follows from the segment's seed and `n` alone. Prompts that share
//! blocks share segments, so an engine's cache finds in them what it would find in the prompts. A segment may end before the
//! one that it is a part of: so much of it is shared.

use turnstile_fleet::cost::mix;

/// No segment: the empty sequence.
pub const EMPTY: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Segment {
    /// What comes before it.
    before: u32,
    seed: u64,
    /// Tokens up to its end, those before it included.
    end: u64,
}

/// All sequences of a log: each is named by its last segment.
#[derive(Debug, Default)]
pub struct Sequences {
    list: Vec<Segment>,
}

impl Sequences {
    fn get(&self, sequence: u32) -> Option<Segment> {
        self.list.get(sequence as usize).copied()
    }

    /// Its length.
    pub fn len(&self, sequence: u32) -> u64 {
        self.get(sequence).map_or(0, |segment| segment.end)
    }

    /// A sequence with so many more tokens at its end.
    pub fn append(&mut self, before: u32, seed: u64, tokens: u64) -> u32 {
        if tokens == 0 {
            return before;
        }
        let end = self.len(before) + tokens;
        let place = u32::try_from(self.list.len()).unwrap_or(EMPTY);
        self.list.push(Segment { before, seed, end });
        place
    }

    /// The first `tokens` tokens of a sequence, or all where it has no more.
    pub fn cut(&mut self, sequence: u32, tokens: u64) -> u32 {
        let mut at = sequence;
        while let Some(segment) = self.get(at) {
            if segment.end <= tokens {
                return at;
            }
            let begin = self.len(segment.before);
            if begin < tokens {
                return self.append(segment.before, segment.seed, tokens - begin);
            }
            at = segment.before;
        }
        EMPTY
    }

    /// The tokens.
    pub fn lay_out(&self, sequence: u32) -> Vec<u32> {
        self.behind(sequence, EMPTY)
    }

    /// The tokens of a sequence that stand behind another, with which it begins.
    pub fn behind(&self, sequence: u32, before: u32) -> Vec<u32> {
        let first = self.len(before);
        let mut tokens = vec![0; usize::try_from(self.len(sequence).saturating_sub(first)).unwrap_or_default()];
        let mut at = sequence;
        while let Some(segment) = self.get(at).filter(|_| at != before) {
            let begin = self.len(segment.before);
            let place = |token: u64| usize::try_from(token.saturating_sub(first)).unwrap_or(usize::MAX);
            if let Some(target) = tokens.get_mut(place(begin)..place(segment.end)) {
                let seed = mix(segment.seed);
                for (n, token) in (0_u64..).zip(target) {
                    *token = token_of(seed, n);
                }
            }
            at = segment.before;
        }
        tokens
    }
}

fn token_of(seed: u64, n: u64) -> u32 {
    // The upper half: `as` would take the lower one.
    u32::try_from(mix(seed.wrapping_add(n)) >> 32).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shared_is_equal_and_the_rest_is_not() {
        let mut all = Sequences::default();
        let head = all.append(EMPTY, 1, 10);
        let long = all.append(head, 2, 5);
        let cut = all.cut(long, 12);
        let other = all.append(cut, 3, 4);
        assert_eq!((all.len(long), all.len(cut), all.len(other)), (15, 12, 16));
        let (long, other) = (all.lay_out(long), all.lay_out(other));
        assert_eq!((long.len(), other.len()), (15, 16));
        assert_eq!(long.iter().zip(&other).take_while(|(a, b)| a == b).count(), 12);
        let distinct: std::collections::BTreeSet<_> = other.iter().collect();
        assert_eq!(distinct.len(), 16);
    }

    #[test]
    fn a_cut_at_the_end_of_a_segment_is_that_segment() {
        let mut all = Sequences::default();
        let head = all.append(EMPTY, 1, 10);
        let long = all.append(head, 2, 5);
        assert_eq!(all.cut(long, 10), head);
        assert_eq!(all.cut(long, 99), long);
        assert_eq!(all.cut(long, 0), EMPTY);
        assert_eq!(all.append(long, 9, 0), long);
        assert_eq!(all.behind(long, head), all.lay_out(long).split_off(10));
    }
}
