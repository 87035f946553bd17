//! Waiting for a plugin that has paused, in time that is only counted: its calls are answered and its ticks come, and nobody waits
//! for a clock.

use std::cell::Cell;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};
use turnstile_plugins::{Effects, Lent, Plugin, Stream, StreamEnv};

/// How much time passes at a time while a plugin waits, ms.
const STEP_MS: u64 = 10;
/// The longest wait, ms, for a plugin that asks again and again: longer than any pause. (Under test a busy machine may take longer
/// over an hour of it than the work may take.)
const LONGEST_WAIT_MS: u64 = if cfg!(test) { 60_000 } else { 3_600_000 };

/// How long ticks and replies may work for plugins that wait: each is bounded, and there may be very many.
const LONGEST_WORK: Duration = Duration::from_secs(20);

/// Who answers a plugin's calls.
pub trait Answers {
    /// Answers what was asked, `now_ms` after the beginning. Replies may ask for more: that is answered the next time. Whether there
    /// was anything.
    fn serve(&self, now_ms: u64) -> bool;
}

/// A plugin that may wait.
pub struct Waiting<'a> {
    /// The plugin.
    pub plugin: &'a Plugin,
    /// Who answers its calls.
    pub answers: &'a dyn Answers,
    /// How long a pause may last with no call under way, ms.
    pub pause_ms: u64,
    /// The longest that a pause may last with calls, one after the other, ms.
    pub longest_ms: u64,
    /// Time since the beginning, ms.
    pub now_ms: u64,
    /// How long it may really take, beside the time that is only counted.
    real: Duration,
    worked: Cell<Duration>,
}

/// How long one pause has lasted.
pub struct Patience {
    began_ms: u64,
    idle_ms: u64,
}

// === impl Waiting ===

impl<'a> Waiting<'a> {
    /// A plugin at the beginning of time.
    pub fn new(plugin: &'a Plugin, answers: &'a dyn Answers, pause_ms: u64) -> Self {
        let (real, worked) = (LONGEST_WORK, Cell::new(Duration::ZERO));
        Self { plugin, answers, pause_ms, longest_ms: LONGEST_WAIT_MS, now_ms: 0, real, worked }
    }

    /// The same, with so much real time for what the plugin does meanwhile.
    #[cfg(test)]
    pub fn within(self, real: Duration) -> Self {
        Self { real, ..self }
    }

    /// The same at a later time, for a plugin that has had ticks before.
    #[must_use]
    pub fn at(self, now_ms: u64) -> Self {
        Self { now_ms, ..self }
    }

    /// Answers calls, and ticks if time passes, with the environment where replies can edit it. Whether there was a call, and what
    /// was asked for the stream.
    ///
    /// # Errors
    /// The instance that holds the stream is gone, or its callbacks have taken too long altogether.
    pub fn listen<E: StreamEnv>(
        &self,
        stream: &mut Stream,
        env: &mut Lent<E>,
        ticks: bool,
    ) -> Result<(bool, Effects), String> {
        if self.worked.get() > self.real {
            return Err(format!("its ticks and replies have taken more than {} s", self.real.as_secs()));
        }
        let (asked, mut effects) = {
            let parked = env.park();
            let polled = stream.poll_effects(&mut Context::from_waker(Waker::noop()), parked.berth());
            let effects = match polled {
                Poll::Ready(effects) => effects.map_err(|fault| fault.to_string())?,
                Poll::Pending => Effects::default(),
            };
            let began = Instant::now();
            let asked = self.answers.serve(self.now_ms);
            if ticks {
                self.plugin.tick(self.now_ms);
            }
            self.worked.set(self.worked.get() + began.elapsed());
            (asked, effects)
        };
        effects.merge(stream.take_effects());
        Ok((asked, effects))
    }
}

// === impl Patience ===

impl Patience {
    /// With a pause that begins now.
    pub fn new(waiting: &Waiting<'_>) -> Self {
        Self { began_ms: waiting.now_ms, idle_ms: 0 }
    }

    /// Lets some time pass, unless the pause has lasted too long. `asked`: a call was answered just now.
    pub fn lasts(&mut self, waiting: &mut Waiting<'_>, asked: bool) -> bool {
        // A call is answered at once, so none is under way when there was none to answer.
        self.idle_ms = if asked { 0 } else { self.idle_ms + STEP_MS };
        if self.idle_ms > waiting.pause_ms || self.waited_ms(waiting) > waiting.longest_ms {
            return false;
        }
        waiting.now_ms += STEP_MS;
        true
    }

    /// How long it has lasted, ms.
    pub fn waited_ms(&self, waiting: &Waiting<'_>) -> u64 {
        waiting.now_ms - self.began_ms
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::workbench::arguments::GivenArgs;
    use crate::workbench::filter::callees::Callees;
    use crate::workbench::subject::{Subject, runtime};
    use turnstile_plugins::HttpEnv;

    #[test]
    fn what_ticks_and_replies_really_take_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pauses.wat");
        let module = r#"(module (memory (export "memory") 1)
            (func (export "proxy_abi_version_0_2_1"))
            (func (export "proxy_on_memory_allocate") (param i32) (result i32) (i32.const 0))
            (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32) (i32.const 1)))"#;
        std::fs::write(&file, wat::parse_str(module).unwrap()).unwrap();
        let subject = Subject::read(&file, &GivenArgs::default()).unwrap();
        let started = subject.start_among(&runtime(None).unwrap(), Callees::default()).unwrap();
        let mut env = Lent::new(HttpEnv::default());
        let mut stream = started.plugin.open_stream(0);
        stream.on_request_headers(&mut env, true).unwrap();
        let nobody = Callees::default();
        let waiting = Waiting::new(&started.plugin, &nobody, 30_000);
        let waiting = waiting.within(Duration::ZERO);
        assert!(waiting.listen(&mut stream, &mut env, true).is_ok(), "nothing has been done yet");
        let error = waiting.listen(&mut stream, &mut env, true).unwrap_err();
        assert_eq!(error, "its ticks and replies have taken more than 0 s");
    }
}
