//! Sessions of one engine: what a turn in one of them starts from.

use super::{
    radix::NodeId,
    request::{RequestKey, SessionParams},
};
use crate::tokenizer::TokenId;
use hashbrown::HashMap;

/// KV that a streaming session holds between turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    /// The part in the tree, locked.
    pub node: Option<NodeId>,
    /// Tokens of that part.
    pub tree_tokens: usize,
    /// Tokens outside the tree, whole pages.
    pub private: usize,
    /// Tokens with KV.
    pub committed: usize,
}

/// A finished turn of a non-streaming session.
#[derive(Debug)]
struct Turn {
    prompt: Vec<TokenId>,
    output: Vec<TokenId>,
    parent: Option<String>,
}

/// One open session.
#[derive(Debug, Default)]
pub(crate) struct Session {
    streaming: bool,
    timeout_us: Option<i64>,
    last_admission_us: u64,
    closing: bool,
    /// The engine's single-flight mark of a streaming session.
    in_flight: bool,
    /// Turns really in the engine, refused ones excluded.
    live: Vec<RequestKey>,
    /// A refusal cleared the mark while a turn was running.
    mark_lost: bool,
    /// The damage is done; the end of the last live turn ends the worker.
    doomed: bool,
    history: Vec<TokenId>,
    slot: Option<Slot>,
    turns: HashMap<String, Turn>,
}

/// What a turn begins with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// Compute these tokens.
    Run(Vec<TokenId>),
    /// Refuse with this text.
    Refuse(String),
}

/// What follows from the end of a turn, or from a close.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Consequence {
    /// The worker dies.
    pub crash: bool,
    /// KV to free.
    pub release: Option<Slot>,
}

/// All sessions of one engine.
#[derive(Debug)]
pub(crate) struct Sessions {
    crash_mode: bool,
    open: HashMap<String, Session>,
    /// Turn or close that would have ended a stock server, when `crash_mode` is off.
    pub(crate) hazards: u64,
}

const ACTIVE: &str = "Streaming session already has an active request.";

impl Sessions {
    pub(crate) fn new(crash_mode: bool) -> Self {
        Self { crash_mode, open: HashMap::new(), hazards: 0 }
    }

    /// Opens a session; false when the id is open or closing.
    pub(crate) fn open(&mut self, now_us: u64, id: &str, streaming: bool, timeout_s: Option<f64>) -> bool {
        if self.open.contains_key(id) {
            return false;
        }
        #[expect(clippy::cast_possible_truncation, reason = "a timeout is far below the limit, and casts saturate")]
        let timeout_us = timeout_s.map(|seconds| (seconds * 1e6) as i64);
        let session = Session { streaming, timeout_us, last_admission_us: now_us, ..Session::default() };
        self.open.insert(id.to_owned(), session);
        true
    }

    /// Open sessions that are streaming and hold a row: one for each with a slot, and each turn running in one.
    pub(crate) fn idle_slots(&self) -> impl Iterator<Item = &Slot> {
        self.open.values().filter_map(|session| session.slot.as_ref())
    }

    /// True while the passing of time can change something.
    pub(crate) fn needs_ticks(&self) -> bool {
        self.open.values().any(|session| session.timeout_us.is_some() || session.closing)
    }

    /// How many are open or closing.
    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }

    /// How many of them are streaming.
    pub(crate) fn streaming(&self) -> usize {
        self.open.values().filter(|session| session.streaming).count()
    }

    /// Whether this session is open or closing.
    pub(crate) fn is_open(&self, id: &str) -> bool {
        self.open.contains_key(id)
    }

    /// A turn arrives. On [`Entry::Run`] of a streaming session the turn holds the session until [`Sessions::end_turn`].
    pub(crate) fn enter(&mut self, now_us: u64, key: RequestKey, params: &SessionParams, new: &[TokenId]) -> Entry {
        let Some(session) = self.open.get_mut(&params.id) else {
            return Entry::Refuse(format!("Invalid request: session id {} does not exist", params.id));
        };
        if session.closing {
            return Entry::Refuse(format!("Invalid request: close was requested for session {}", params.id));
        }
        if session.streaming {
            if session.in_flight {
                return Entry::Refuse(ACTIVE.to_owned());
            }
            for (asked, name) in [
                (params.replace, "replace"),
                (params.drop_previous_output, "drop_previous_output"),
                (params.offset.is_some_and(|offset| offset != 0), "offset"),
            ] {
                if asked {
                    return Entry::Refuse(format!("Streaming sessions do not support {name}."));
                }
            }
            if session.mark_lost && !session.live.is_empty() {
                if !self.crash_mode {
                    self.hazards += 1;
                    return Entry::Refuse(ACTIVE.to_owned());
                }
                session.doomed = true;
            }
            session.in_flight = true;
            session.live.push(key);
            session.last_admission_us = now_us;
            return Entry::Run([session.history.as_slice(), new].concat());
        }
        let entry = session.enter_tree(params, new);
        if matches!(entry, Entry::Run(_)) {
            session.live.push(key);
            session.last_admission_us = now_us;
        }
        entry
    }

    /// Takes the KV that the session holds, for the turn that goes on with it.
    pub(crate) fn take_slot(&mut self, id: &str) -> Option<Slot> {
        self.open.get_mut(id)?.slot.take()
    }

    /// The KV that the session holds.
    pub(crate) fn slot(&self, id: &str) -> Option<&Slot> {
        self.open.get(id)?.slot.as_ref()
    }

    /// True when KV of a turn that ends now stays with the session.
    pub(crate) fn keeps_kv(&self, id: &str) -> bool {
        self.open.get(id).is_some_and(|session| session.streaming && session.live.len() <= 1)
    }

    /// A refused turn has passed through the queue. In a stock server this clears the mark of the running one.
    pub(crate) fn refusal_done(&mut self, id: &str) {
        if let Some(session) = self.open.get_mut(id).filter(|session| session.streaming && !session.live.is_empty()) {
            session.mark_lost = true;
            session.in_flight = !self.crash_mode;
        }
    }

    /// A turn ended. `finished` holds its prompt, output and, if the session keeps it, KV; none when it was aborted.
    pub(crate) fn end_turn(
        &mut self,
        key: RequestKey,
        params: &SessionParams,
        rid: &str,
        finished: Option<(Vec<TokenId>, Vec<TokenId>, Option<Slot>)>,
    ) -> Consequence {
        let kept = finished.as_ref().and_then(|(_, _, slot)| *slot);
        let Some(session) = self.open.get_mut(&params.id) else {
            return Consequence { crash: false, release: kept };
        };
        session.live.retain(|live| *live != key);
        if session.live.is_empty() {
            session.in_flight = false;
            session.mark_lost = false;
            if session.doomed {
                return Consequence { crash: true, release: kept };
            }
        }
        let Some((mut prompt, output, slot)) = finished else { return Consequence::default() };
        if session.streaming {
            prompt.extend(output);
            session.history = prompt;
            let old = std::mem::replace(&mut session.slot, slot);
            return Consequence { crash: false, release: old };
        }
        let parent = params.rid.clone().filter(|parent| session.turns.contains_key(parent));
        session.turns.insert(rid.to_owned(), Turn { prompt, output, parent });
        Consequence::default()
    }

    /// Closes a session, at once or when its turn has ended. Unknown ids are nothing.
    pub(crate) fn close(&mut self, id: &str) -> Consequence {
        let Some(session) = self.open.get_mut(id) else { return Consequence::default() };
        if session.live.is_empty() {
            let slot = self.open.remove(id).and_then(|session| session.slot);
            return Consequence { crash: false, release: slot };
        }
        if session.streaming && session.mark_lost {
            // The stock server believes that nothing runs and frees the KV under the running turn.
            if self.crash_mode {
                session.doomed = true;
            } else {
                self.hazards += 1;
            }
        }
        session.closing = true;
        Consequence::default()
    }

    /// The check of once a second: idle sessions close, closed ones go. Returns KV to free.
    pub(crate) fn tick(&mut self, now_us: u64) -> Vec<Slot> {
        let due: Vec<String> = self
            .open
            .iter()
            .filter(|(_, session)| {
                let idle_us = i64::try_from(now_us.saturating_sub(session.last_admission_us)).unwrap_or(i64::MAX);
                let idle = session.timeout_us.is_some_and(|timeout| idle_us > timeout);
                idle || (session.closing && session.live.is_empty())
            })
            .map(|(id, _)| id.clone())
            .collect();
        due.iter().filter_map(|id| self.close(id).release).collect()
    }
}

impl Session {
    /// A turn of a non-streaming session: a tree of turns, each named by its rid.
    fn enter_tree(&mut self, params: &SessionParams, new: &[TokenId]) -> Entry {
        let Some(rid) = &params.rid else {
            if params.replace {
                self.turns.clear();
            }
            return Entry::Run(new.to_vec());
        };
        let Some(turn) = self.turns.get(rid) else {
            return Entry::Refuse("Invalid request session id".to_owned());
        };
        let mut context = turn.prompt.clone();
        if !params.drop_previous_output {
            context.extend(&turn.output);
        }
        if let Some(offset) = params.offset.filter(|offset| *offset != 0) {
            let keep = usize::try_from(offset).unwrap_or_else(|_| {
                context.len().saturating_sub(usize::try_from(offset.unsigned_abs()).unwrap_or(usize::MAX))
            });
            context.truncate(keep);
        }
        context.extend(new);
        if params.replace {
            self.drop_children(rid);
        }
        Entry::Run(context)
    }

    fn drop_children(&mut self, rid: &str) {
        let mut gone = vec![rid.to_owned()];
        while let Some(parent) = gone.pop() {
            let children: Vec<String> = self
                .turns
                .iter()
                .filter(|(_, turn)| turn.parent.as_deref() == Some(&parent))
                .map(|(child, _)| child.clone())
                .collect();
            for child in children {
                self.turns.remove(&child);
                gone.push(child);
            }
        }
    }
}
