//! The faults in force, and when.

use super::{Fault, FaultKind};
use parking_lot::Mutex;
use std::time::Duration;
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};

/// When in a request's life a fault is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moment {
    /// Its head is there, its body unread.
    Early,
    /// All of it is there.
    Whole,
}

/// What happens without a request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Action {
    Begin(FaultKind),
    End(FaultKind),
}

#[derive(Debug)]
struct Active {
    fault: Fault,
    /// Its window begins then.
    from: Instant,
    /// Requests left in this window.
    left: Option<u32>,
    random: u64,
    /// Of a fault that acts alone: it has begun and not ended.
    begun: bool,
    /// Nothing more will come of it.
    over: bool,
}

/// The faults in force.
#[derive(Debug)]
pub struct Faults {
    list: Mutex<Vec<Active>>,
    changed: Notify,
    refusing: watch::Sender<bool>,
}

impl Default for Faults {
    fn default() -> Self {
        Self { list: Mutex::default(), changed: Notify::new(), refusing: watch::channel(false).0 }
    }
}

impl Faults {
    /// Adds a fault; the oldest that fits a request is used first.
    pub fn add(&self, fault: Fault) {
        let active = Active {
            from: Instant::now() + fault.after,
            left: fault.count,
            random: fault.seed,
            begun: false,
            over: false,
            fault,
        };
        self.list.lock().push(active);
        self.changed.notify_one();
    }

    /// Removes all; the port listens again and the engine goes on.
    pub fn clear(&self) {
        self.list.lock().clear();
        self.refusing.send_replace(false);
        self.add(Fault::always(FaultKind::Unwedge));
    }

    /// How many are waiting or in force.
    pub fn len(&self) -> usize {
        self.list.lock().len()
    }

    /// None is waiting or in force.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether new connections are refused.
    pub(crate) fn refusing(&self) -> &watch::Sender<bool> {
        &self.refusing
    }

    /// The fault for a request of this path, counted as used.
    pub(crate) fn take(&self, moment: Moment, path: &str, inference: bool) -> Option<FaultKind> {
        let now = Instant::now();
        let mut list = self.list.lock();
        list.iter_mut().for_each(|active| active.turn_to(now));
        list.retain(|active| !active.over);
        let found = list.iter_mut().find_map(|active| {
            let fits = active.is_open(now)
                && !active.fault.acts_alone()
                && active.fault.early == (moment == Moment::Early)
                && active.fault.path.as_ref().map_or(inference, |prefix| path.starts_with(prefix.as_str()));
            (fits && active.hits()).then(|| active.fault.kind.clone())
        });
        list.retain(|active| active.fault.every.is_some() || active.left != Some(0));
        found
    }

    /// What is due without a request, in the order of the list.
    pub(crate) fn due(&self) -> Vec<Action> {
        let now = Instant::now();
        let mut list = self.list.lock();
        let mut due = Vec::new();
        for active in list.iter_mut().filter(|active| active.fault.acts_alone()) {
            active.act(now, &mut due);
        }
        list.retain(|active| !active.over);
        due
    }

    /// Waits until [`Faults::due`] may have something.
    pub(crate) async fn until_due(&self) {
        let changed = self.changed.notified();
        let next = self.list.lock().iter().filter(|active| active.fault.acts_alone()).filter_map(Active::next).min();
        match next {
            Some(at) => tokio::select! {
                () = tokio::time::sleep_until(at) => {}
                () = changed => {}
            },
            None => changed.await,
        }
    }
}

impl Active {
    /// Whether its window is open.
    fn is_open(&self, now: Instant) -> bool {
        now >= self.from && self.left != Some(0) && self.fault.lasts.is_none_or(|lasts| now < self.from + lasts)
    }

    /// Goes on to the window of this time.
    fn turn_to(&mut self, now: Instant) {
        if self.fault.acts_alone() {
            return;
        }
        match self.fault.every.filter(|every| !every.is_zero()) {
            Some(every) => {
                while now >= self.from + every {
                    self.from += every;
                    self.left = self.fault.count;
                }
            }
            None => self.over |= self.fault.lasts.is_some_and(|lasts| now >= self.from + lasts),
        }
    }

    /// Whether a request that fits is hit; if so, it is counted.
    fn hits(&mut self) -> bool {
        if let Some(share) = self.fault.probability {
            self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let drawn = xxhash_rust::xxh3::xxh3_64_with_seed(&self.random.to_le_bytes(), self.fault.seed);
            #[expect(clippy::cast_precision_loss, reason = "a share needs no more")]
            if (drawn >> 11) as f64 / (1_u64 << 53) as f64 >= share {
                return false;
            }
        }
        if let Some(left) = &mut self.left {
            *left = left.saturating_sub(1);
        }
        true
    }

    /// When something happens next to a fault that acts alone.
    fn next(&self) -> Option<Instant> {
        match (self.begun, self.fault.lasts) {
            (false, _) => Some(self.from),
            (true, Some(lasts)) => Some(self.from + lasts),
            (true, None) => None,
        }
    }

    /// Begins, ends and begins again what is due.
    fn act(&mut self, now: Instant, due: &mut Vec<Action>) {
        if !self.begun && now >= self.from {
            self.begun = true;
            due.push(Action::Begin(self.fault.kind.clone()));
        }
        // What has no end of its own stays in the list only to be seen and repeated.
        let lasting = matches!(self.fault.kind, FaultKind::Refuse | FaultKind::Wedge { .. });
        let ends = if lasting { self.fault.lasts } else { Some(Duration::ZERO) };
        let Some(end) = ends.map(|lasts| self.from + lasts).filter(|end| self.begun && now >= *end) else { return };
        if lasting {
            due.push(Action::End(self.fault.kind.clone()));
        }
        match self.fault.every.filter(|every| !every.is_zero()) {
            Some(every) => {
                while self.from <= end || self.from <= now {
                    self.from += every;
                }
                self.begun = false;
            }
            None => self.over = true,
        }
    }
}
