//! Pieces of an answer's body that filters make themselves.

use super::{FilterRun, FilterVerdict, Side};
use turnstile_plugins::{FaultKind, Injected};

/// Most pieces that wait at a time.
const MOST_PIECES: usize = 4096;

impl FilterRun {
    /// Keeps what a filter has put into the answer's body, until it can go on.
    pub(super) fn inject(&mut self, at: usize, side: Side, pieces: Vec<Injected>) -> Option<FilterVerdict> {
        if side == Side::Request {
            tracing::debug!(at, "a filter put something into the body of an answer before there was one");
            return None;
        }
        self.injected.extend(pieces.into_iter().map(|piece| (at, piece)));
        let size: usize = self.injected.iter().map(|(_, piece)| piece.data.len()).sum();
        let most = self.most_held(at);
        if size <= most && self.injected.len() <= MOST_PIECES {
            return None;
        }
        self.injected.clear();
        let message = format!("more than {most} bytes or {MOST_PIECES} pieces of a response body wait to be injected");
        self.failed(at, FaultKind::Memory, &message)
    }

    /// The pieces that filters have put into the answer's body, each with the filter's position. What they put in while these
    /// go on comes with the next call.
    pub(super) fn take_injected(&mut self) -> Vec<(usize, Injected)> {
        std::mem::take(&mut self.injected)
    }
}
