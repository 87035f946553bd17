//! What filters that have paused hold of bodies.

use bytes::{Bytes, BytesMut};

/// What a filter that has paused holds of a body.
#[derive(Clone, Debug, Default)]
pub(super) struct HeldPart {
    pub(super) bytes: BytesMut,
    /// It is shown again with what comes.
    pub(super) shown: bool,
    /// It is as much as may be held: nothing more is read.
    pub(super) full: bool,
}

impl HeldPart {
    /// What goes before a new piece unseen, and the piece as the filter sees it.
    pub(super) fn meets(self, piece: Bytes) -> (BytesMut, Bytes) {
        match self.shown {
            true => (BytesMut::new(), joined(self.bytes, piece)),
            false => (self.bytes, piece),
        }
    }

    /// What a filter holds once callbacks have seen it and left these bytes of it.
    pub(super) fn seen(part: Option<Self>, bytes: BytesMut) -> Option<Self> {
        match part {
            Some(part) => Some(Self { bytes, ..part }),
            None => (!bytes.is_empty()).then_some(Self { bytes, shown: true, full: false }),
        }
    }
}

/// Two parts of a body.
pub(super) fn joined(mut first: BytesMut, second: Bytes) -> Bytes {
    if first.is_empty() {
        return second;
    }
    first.extend_from_slice(&second);
    first.freeze()
}
