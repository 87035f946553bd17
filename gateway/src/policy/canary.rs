//! A canary: a policy that decides for part of the sessions in the place of another, and is set aside when it does worse.
//!
//! The account is simple on purpose, so that a verdict can be checked by hand: two sums of prompt and cached tokens, two
//! geometric means of the time to the first event, a mean decision time, a count of faults. Nothing in it is random.

use parking_lot::Mutex;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use turnstile_config::Canary;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A side that has this many times `min_turns` forgets half of what it knows of them.
const FORGET_AT: f64 = 4.0;
/// Decisions judged by their mean time, as a part of `min_turns`.
const LATENCY_FROM: f64 = 0.1;
/// The shortest time to the first event, ms: its logarithm must be a number.
const LEAST_TTFT_MS: f64 = 0.01;

/// A canary of a generation.
#[derive(Clone)]
pub struct CanaryRun {
    /// What the configuration says.
    pub options: Canary,
    seed: u64,
    account: Arc<Account>,
}

/// What is known of a canary, for as long as its start of the plugin lives.
#[derive(Default)]
struct Account {
    is_aside: AtomicBool,
    sums: Mutex<Sums>,
}

#[derive(Clone, Default)]
struct Sums {
    canary: Side,
    rest: Side,
    faults: u32,
    decisions: f64,
    decision_ms: f64,
    aside: Option<SetAside>,
}

/// Turns of one side that were answered.
#[derive(Clone, Copy, Default)]
struct Side {
    turns: f64,
    /// Of these, those whose worker told what it had cached.
    told: f64,
    prompt_tokens: f64,
    cached_tokens: f64,
    /// Sum of the logarithms of the times to the first event, ms.
    ln_ttft: f64,
}

/// Why, and when, a canary was set aside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetAside {
    /// `faults`, `decision_ms`, `cached_loss`, `ttft`.
    pub cause: &'static str,
    /// In words, with numbers.
    pub reason: String,
    /// Unix ms.
    pub at: u64,
}

/// What a turn showed.
#[derive(Clone, Copy, Debug)]
pub struct Shown {
    /// What the worker said of its cache, if it did.
    pub prompt: Option<PromptTokens>,
    /// Time to the first event, ms.
    pub ttft_ms: f64,
}

/// Tokens of a prompt.
#[derive(Clone, Copy, Debug)]
pub struct PromptTokens {
    /// All of them.
    pub all: u64,
    /// Those that came from the worker's cache.
    pub cached: u64,
}

// === impl CanaryRun ===

impl CanaryRun {
    /// A canary called `name`; `before` is the same start of the plugin in the generation before, if it goes on.
    pub fn new(name: &str, options: Canary, before: Option<&CanaryRun>) -> Self {
        let same = before.filter(|before| before.options.of == options.of);
        let account = same.map(|before| Arc::clone(&before.account)).unwrap_or_default();
        // Two canaries take different sessions.
        Self { seed: xxh3_64_with_seed(name.as_bytes(), 0), account, options }
    }

    /// Whether it decides for a session. More percent take more sessions, and none is given back.
    pub fn takes(&self, session: u64) -> bool {
        let share = xxh3_64_with_seed(&session.to_le_bytes(), self.seed) % 100;
        share < u64::from(self.options.percent) && !self.account.is_aside.load(Relaxed)
    }

    /// It has decided, within this time. The reason if it is set aside for it.
    pub fn decided(&self, took: Duration) -> Option<SetAside> {
        let mut sums = self.account.sums.lock();
        sums.decisions += 1.0;
        sums.decision_ms += took.as_secs_f64() * 1e3;
        if sums.decisions >= FORGET_AT * self.turns() {
            sums.decisions /= 2.0;
            sums.decision_ms /= 2.0;
        }
        self.judge(&mut sums)
    }

    /// It has failed. The reason if it is set aside for it.
    pub fn failed(&self) -> Option<SetAside> {
        let mut sums = self.account.sums.lock();
        sums.faults = sums.faults.saturating_add(1);
        self.judge(&mut sums)
    }

    /// A turn has ended that it (`by_canary`) or the other plugin decided. The reason if it is set aside for it.
    pub fn ended(&self, by_canary: bool, turn: Shown) -> Option<SetAside> {
        let mut sums = self.account.sums.lock();
        let most = FORGET_AT * self.turns();
        let side = if by_canary { &mut sums.canary } else { &mut sums.rest };
        side.add(turn, most);
        self.judge(&mut sums)
    }

    /// Why it is set aside, if it is.
    pub fn aside(&self) -> Option<SetAside> {
        self.account.sums.lock().aside.clone()
    }

    /// A new try: all that was known is forgotten. False if it was not aside.
    pub fn reset(&self) -> bool {
        *self.account.sums.lock() = Sums::default();
        self.account.is_aside.swap(false, Relaxed)
    }

    /// For the admin listener.
    pub fn json(&self) -> Value {
        let sums = self.account.sums.lock().clone();
        json!({
            "of": self.options.of,
            "percent": self.options.percent,
            "aside": sums.aside.as_ref().map(|a| json!({"cause": a.cause, "reason": a.reason, "at": a.at})),
            "faults": sums.faults,
            "mean_decision_ms": (sums.decisions > 0.0).then(|| sums.decision_ms / sums.decisions),
            "canary": sums.canary.json(),
            "rest": sums.rest.json(),
        })
    }

    fn turns(&self) -> f64 {
        f64::from(self.options.min_turns)
    }

    fn judge(&self, sums: &mut Sums) -> Option<SetAside> {
        if sums.aside.is_some() {
            return None;
        }
        let (cause, reason) = self.verdict(sums)?;
        let aside = SetAside { cause, reason, at: crate::clock::unix_ms() };
        sums.aside = Some(aside.clone());
        self.account.is_aside.store(true, Relaxed);
        Some(aside)
    }

    fn verdict(&self, sums: &Sums) -> Option<(&'static str, String)> {
        let options = &self.options;
        if sums.faults >= options.max_faults {
            return Some(("faults", format!("{} faults, max_faults is {}", sums.faults, options.max_faults)));
        }
        if sums.decisions >= (LATENCY_FROM * self.turns()).max(1.0) {
            let mean = sums.decision_ms / sums.decisions;
            if mean > options.max_decision_ms {
                let most = options.max_decision_ms;
                return Some(("decision_ms", format!("decides in {mean:.3} ms on average, max_decision_ms is {most}")));
            }
        }
        let (canary, rest) = (&sums.canary, &sums.rest);
        let (hits, hits_of_rest) = (canary.cached_ratio(), rest.cached_ratio());
        let told = canary.told.min(rest.told) >= self.turns();
        if told && hits_of_rest - hits > options.max_cached_loss {
            let most = options.max_cached_loss;
            let text = format!(
                "{hits:.3} of its prompt tokens were cached, {hits_of_rest:.3} of the others', max_cached_loss is {most}"
            );
            return Some(("cached_loss", text));
        }
        let (ttft, ttft_of_rest) = (canary.ttft_ms(), rest.ttft_ms());
        if canary.turns.min(rest.turns) >= self.turns() && ttft > ttft_of_rest * options.max_ttft_ratio {
            let most = options.max_ttft_ratio;
            let text = format!(
                "{ttft:.1} ms to the first event, {ttft_of_rest:.1} ms for the others, max_ttft_ratio is {most}"
            );
            return Some(("ttft", text));
        }
        None
    }
}

// === impl Side ===

impl Side {
    fn add(&mut self, turn: Shown, most: f64) {
        self.turns += 1.0;
        self.ln_ttft += turn.ttft_ms.max(LEAST_TTFT_MS).ln();
        if let Some(prompt) = turn.prompt {
            self.told += 1.0;
            self.prompt_tokens += prompt.all as f64;
            self.cached_tokens += prompt.cached.min(prompt.all) as f64;
        }
        if self.turns >= most {
            self.turns /= 2.0;
            self.ln_ttft /= 2.0;
        }
        if self.told >= most {
            self.told /= 2.0;
            self.prompt_tokens /= 2.0;
            self.cached_tokens /= 2.0;
        }
    }

    fn cached_ratio(&self) -> f64 {
        if self.prompt_tokens > 0.0 { self.cached_tokens / self.prompt_tokens } else { 0.0 }
    }

    fn ttft_ms(&self) -> f64 {
        if self.turns > 0.0 { (self.ln_ttft / self.turns).exp() } else { 0.0 }
    }

    fn json(&self) -> Value {
        json!({
            "turns": self.turns,
            "turns_with_cached_tokens": self.told,
            "cached_ratio": (self.told > 0.0).then(|| self.cached_ratio()),
            "ttft_ms": (self.turns > 0.0).then(|| self.ttft_ms()),
        })
    }
}

#[cfg(test)]
#[path = "canary_tests.rs"]
mod tests;
