//! Agents that talk in turns, as a recording would have them.

use crate::recording::encode_blocks;
use crate::recording::line::{FleetLine, TurnLine, WorkerEntry, text};
use crate::replay::virtual_time::Dice;
use turnstile_fleet::cost::mix;

/// Bytes of a block, and bytes that are a token.
const BLOCK: u64 = 512;
const PER_TOKEN: u64 = 4;

/// Agents with a common preamble, each with a conversation of its own that grows.
#[derive(Clone)]
pub struct Forest {
    pub agents: u64,
    pub turns: u64,
    pub seed: u64,
    pub pool: &'static str,
    /// Mean time between two turns of an agent, ms.
    pub gap_ms: u64,
    /// Some turns have hints.
    pub hints: bool,
    /// Every third agent is a sub-agent of the one before it.
    pub children: bool,
}

impl Default for Forest {
    fn default() -> Self {
        Self { agents: 4, turns: 3, seed: 1, pool: "main", gap_ms: 2_000, hints: false, children: true }
    }
}

impl Forest {
    /// The recording.
    pub fn log(&self) -> String {
        let mut lines = vec![(0, self.fleet())];
        for agent in 0..self.agents {
            self.agent(agent, &mut lines);
        }
        // A line is written when its turn has ended.
        lines.sort_by_key(|(at, _)| *at);
        lines.into_iter().map(|(_, line)| line + "\n").collect()
    }

    fn fleet(&self) -> String {
        let worker = |n: u32| WorkerEntry {
            id: format!("w{n}"),
            pool: self.pool.into(),
            capabilities: vec!["tag".into(), "priority".into()],
            ranks: 1,
            max_running: 16,
            kv_capacity_tokens: 80_000,
            prefill_tokens_per_s: 9_000.0,
            ..WorkerEntry::default()
        };
        text("fleet", &FleetLine { ts: 1_700_000_000_000, generation: 1, workers: (0..3).map(worker).collect() })
            .unwrap()
    }

    fn agent(&self, agent: u64, lines: &mut Vec<(u64, String)>) {
        let mut dice = Dice::new(self.seed ^ mix(agent + 1));
        let key = |agent: u64| format!("{:016x}{:016x}", mix(self.seed ^ agent), mix(agent ^ 0xabcd));
        let parent = (self.children && agent % 3 == 2).then(|| key(agent - 1));
        let mut at = 1_700_000_000_000 + dice.below(self.gap_ms * 2);
        // 2 KB of preamble that all share, then the agent's own.
        let mut bytes = 2_048 + 4_096 + dice.below(8_192);
        let mut cached = 0;
        for turn in 1..=self.turns {
            let prompt_tokens = bytes / PER_TOKEN;
            let answer = 20 + dice.below(60);
            let blocks: Vec<u64> = (0..bytes / BLOCK).map(|n| self.block(agent, n)).collect();
            let ttft = 40.0 + (prompt_tokens - cached) as f64 / 9.0;
            let total = ttft + answer as f64 * 7.0;
            let line = TurnLine {
                ts: at,
                pool: self.pool.into(),
                route: "chat".into(),
                stream: true,
                tenant: format!("{:016x}", mix(self.seed)),
                session: Some(key(agent)),
                parent: parent.clone(),
                tree: parent.clone(),
                turn: u32::try_from(turn).ok(),
                agent: "other".into(),
                source: "nvext".into(),
                priority: (self.hints && agent % 4 == 1).then_some(if turn % 2 == 0 { 5 } else { -5 }),
                osl: self.hints.then_some(u32::try_from(answer).unwrap()),
                body_bytes: bytes + 300,
                prompt_bytes: bytes,
                block_bytes: u32::try_from(BLOCK).unwrap(),
                blocks: encode_blocks(&blocks),
                prompt_tokens: Some(prompt_tokens),
                cached_tokens: Some(cached),
                completion_tokens: Some(answer),
                worker: Some(format!("w{}", agent % 3)),
                mode: Some("affinity".into()),
                ttft_ms: Some(ttft.round()),
                total_ms: total.round(),
                attempts: 1,
                status: 200,
                end: "finished".into(),
                finish_reason: Some("stop".into()),
                ..TurnLine::default()
            };
            let end = at + total.round() as u64;
            lines.push((end, text("turn", &line).unwrap()));
            cached = prompt_tokens + answer / 2;
            bytes += answer * PER_TOKEN + 600 + dice.below(3_000);
            at = end + self.gap_ms / 2 + dice.below(self.gap_ms);
        }
    }

    /// The hash of a block: of the preamble or the agent's own.
    fn block(&self, agent: u64, n: u64) -> u64 {
        let whose = if n < 2_048 / BLOCK { 0 } else { agent + 1 };
        mix(mix(self.seed ^ 0x5eed) ^ mix(whose) ^ mix(n))
    }
}
