//! Pieces of an answer's body that filters make themselves.

use super::{FilterRun, FilterVerdict, Side};
use bytes::Bytes;
use turnstile_plugins::{FaultKind, Injected};

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
        if size <= most && self.injected.len() <= most {
            return None;
        }
        self.injected.clear();
        self.failed(at, FaultKind::Memory, &format!("more than {most} bytes of a response body wait to be injected"))
    }

    /// The next piece that a filter has put into the answer's body, with the filter's position.
    pub(super) fn next_injected(&mut self) -> Option<(usize, Bytes, bool)> {
        if self.injected.is_empty() {
            return None;
        }
        let (at, piece) = self.injected.remove(0);
        Some((at, piece.data, piece.end))
    }
}
