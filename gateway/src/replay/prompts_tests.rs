#![allow(clippy::unwrap_used)]

use super::*;
use crate::recording::line::TurnLine;

/// A turn of a session with `blocks` whole blocks of 100 tokens, and what comes behind them.
struct Maker {
    blocks: Blocks,
    entries: Vec<Entry>,
}

impl Maker {
    fn new() -> Self {
        Self { blocks: Blocks::default(), entries: Vec::new() }
    }

    fn turn(&mut self, session: Option<&str>, blocks: &[u64], prompt: u64, cached: Option<u64>, answer: u64) {
        let leaf = blocks.iter().fold(NONE, |parent, hash| self.blocks.child(parent, *hash));
        let line = TurnLine {
            session: session.map(str::to_owned),
            prompt_bytes: prompt * 4,
            block_bytes: 400,
            prompt_tokens: Some(prompt),
            cached_tokens: cached,
            completion_tokens: Some(answer),
            ..TurnLine::default()
        };
        self.entries.push(Entry { line, leaf });
    }

    fn lay_out(mut self) -> (Prompts, Vec<Vec<u32>>) {
        let prompts = lay_out(&self.entries, &mut self.blocks);
        let tokens = prompts.list.iter().map(|prompt| prompts.sequences.lay_out(prompt.sequence)).collect();
        (prompts, tokens)
    }
}

fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[test]
fn prompts_share_their_common_blocks_and_are_as_long_as_reported() {
    let mut maker = Maker::new();
    maker.turn(None, &[1, 2, 3], 350, None, 10);
    maker.turn(None, &[1, 2, 4, 5], 420, None, 10);
    maker.turn(None, &[1, 2, 3], 350, None, 10);
    let (prompts, tokens) = maker.lay_out();
    assert_eq!(tokens.iter().map(Vec::len).collect::<Vec<_>>(), [350, 420, 350]);
    assert_eq!(common(&tokens[0], &tokens[1]), 200);
    assert_eq!(common(&tokens[0], &tokens[2]), 300, "what is behind the blocks is a prompt's own");
    let ideal: Vec<u64> = prompts.list.iter().map(|prompt| prompt.ideal_cached).collect();
    assert_eq!(ideal, [0, 200, 300]);
}

#[test]
fn a_turn_that_goes_on_shares_the_answer_as_far_as_was_reported() {
    let mut maker = Maker::new();
    maker.turn(Some("s"), &[1, 2, 3], 350, Some(0), 60);
    // 350 and 60 tokens were there, of which the last has no KV: 405 were found again.
    maker.turn(Some("s"), &[1, 2, 3, 4, 5], 560, Some(405), 20);
    maker.turn(Some("s"), &[1, 2, 3, 4, 5, 6], 640, None, 20);
    // Another conversation with the same blocks does not have the answer.
    maker.turn(Some("t"), &[1, 2, 3, 4, 5], 520, None, 20);
    let (prompts, tokens) = maker.lay_out();
    let with_answer = prompts.sequences.lay_out(prompts.list[0].with_answer);
    assert_eq!(with_answer.len(), 410);
    assert_eq!(common(&with_answer, &tokens[1]), 405);
    assert_eq!(prompts.list[1].ideal_cached, 405);
    assert_eq!(common(&tokens[1], &tokens[3]), 500, "whole blocks, wherever their tokens come from");
    // Nothing was reported for the third turn: it shares as much as the second one did.
    let second = prompts.sequences.lay_out(prompts.list[1].with_answer);
    let share = 105.0 / 109.0;
    let expected = 500 + (79.0 * share) as usize;
    assert_eq!(common(&second, &tokens[2]), expected);
    assert_eq!(prompts.list[2].ideal_cached, expected as u64);
}

#[test]
fn a_report_below_the_whole_blocks_says_nothing() {
    let mut maker = Maker::new();
    maker.turn(Some("s"), &[1, 2, 3], 350, Some(0), 60);
    maker.turn(Some("s"), &[1, 2, 3, 4], 470, Some(200), 20);
    let (prompts, tokens) = maker.lay_out();
    assert_eq!(common(&tokens[0], &tokens[1]), 300);
    assert_eq!(prompts.list[1].ideal_cached, 300);
}

#[test]
fn a_turn_of_deltas_gets_its_history() {
    let mut maker = Maker::new();
    maker.turn(Some("s"), &[1, 2], 250, Some(0), 50);
    maker.turn(Some("s"), &[7], 420, Some(299), 30);
    maker.entries[1].line.mode = Some("stream".into());
    maker.entries[1].line.prompt_bytes = 480;
    let (prompts, tokens) = maker.lay_out();
    assert_eq!(prompts.deltas, 1);
    let first = prompts.sequences.lay_out(prompts.list[0].with_answer);
    assert_eq!((tokens[1].len(), common(&first, &tokens[1])), (420, 300));
    // 250 tokens are 1000 bytes, so 50 are 200, and 480 came with the turn.
    assert_eq!((prompts.list[1].bytes, prompts.list[1].ideal_cached), (1_680, 299));
}

#[test]
fn a_repeated_prompt_of_a_session_shares_all_but_its_last_token() {
    let mut maker = Maker::new();
    maker.turn(Some("s"), &[1, 2], 250, Some(0), 50);
    maker.turn(Some("s"), &[1, 2], 250, Some(249), 50);
    let (prompts, tokens) = maker.lay_out();
    assert_eq!(common(&tokens[0], &tokens[1]), 249);
    assert_eq!(prompts.list[1].ideal_cached, 249);
}

#[test]
fn strange_sizes_do_no_harm() {
    let mut maker = Maker::new();
    maker.turn(Some("s"), &[1, 2, 3], 1, Some(900), 0);
    maker.turn(Some("s"), &[1, 2, 3, 4], 5_000_000, Some(5_000_000), 1);
    maker.turn(Some("s"), &[1, 2, 3, 4, 5], 2, None, 1);
    maker.turn(None, &[], 3, None, 1);
    for entry in &mut maker.entries {
        entry.line.prompt_bytes = 0;
    }
    let (prompts, tokens) = maker.lay_out();
    for (prompt, tokens) in prompts.list.iter().zip(&tokens) {
        assert!(!tokens.is_empty() && prompt.ideal_cached < tokens.len() as u64);
    }
}
