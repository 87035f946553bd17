//! A body in pieces, so that what is long need not be copied to put something beside it.

use bytes::{Bytes, BytesMut};

/// What is shorter is copied: a piece of its own costs more.
const SHARED: usize = 8 * 1024;

/// A body as its pieces, one after the other. None of them is empty.
#[derive(Clone, Debug, Default)]
pub struct Pieces {
    list: Vec<Bytes>,
    len: usize,
}

/// Puts pieces together: parts of a body and new text.
pub(super) struct Builder<'a> {
    body: &'a Bytes,
    /// What has been copied since the last piece.
    copied: BytesMut,
    pieces: Pieces,
}

// === impl Pieces ===

impl Pieces {
    /// Bytes of all pieces.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The pieces in order.
    pub fn iter(&self) -> std::slice::Iter<'_, Bytes> {
        self.list.iter()
    }

    /// Everything in one piece: copied, unless there is only one.
    pub fn joined(mut self) -> Bytes {
        match self.list.len() {
            0 | 1 => self.list.pop().unwrap_or_default(),
            _ => Bytes::from(self.list.concat()),
        }
    }

    fn push(&mut self, piece: Bytes) {
        if !piece.is_empty() {
            self.len += piece.len();
            self.list.push(piece);
        }
    }
}

impl From<Bytes> for Pieces {
    fn from(body: Bytes) -> Self {
        let mut pieces = Self::default();
        pieces.push(body);
        pieces
    }
}

// === impl Builder ===

impl<'a> Builder<'a> {
    /// Nothing yet. `new_bytes`: how much text will be new, roughly.
    pub fn new(body: &'a Bytes, new_bytes: usize) -> Self {
        let copied = BytesMut::with_capacity(new_bytes + body.len().min(SHARED));
        Self { body, copied, pieces: Pieces::default() }
    }

    /// Appends a part of the body.
    pub fn keep(&mut self, from: usize, to: usize) {
        let Some(part) = self.body.get(from..to) else { return };
        if part.len() < SHARED {
            self.copied.extend_from_slice(part);
        } else {
            self.end_copied();
            self.pieces.push(self.body.slice(from..to));
        }
    }

    /// Appends new text.
    pub fn put(&mut self, text: &[u8]) {
        self.copied.extend_from_slice(text);
    }

    /// The pieces.
    pub fn finish(mut self) -> Pieces {
        self.end_copied();
        self.pieces
    }

    fn end_copied(&mut self) {
        self.pieces.push(self.copied.split().freeze());
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn long_parts_are_shared_and_short_ones_copied() {
        let body = Bytes::from([vec![b'a'; 10], vec![b'b'; SHARED], vec![b'c'; 20]].concat());
        let mut out = Builder::new(&body, 3);
        out.keep(0, 10);
        out.put(b"new");
        out.keep(10, 10 + SHARED);
        out.keep(10 + SHARED, body.len());
        let pieces = out.finish();
        let lengths: Vec<usize> = pieces.iter().map(Bytes::len).collect();
        assert_eq!(lengths, [13, SHARED, 20]);
        assert_eq!(pieces.len(), body.len() + 3);
        assert_eq!(pieces.iter().nth(1).unwrap().as_ptr(), body[10..].as_ptr(), "the long part is the body's own");
        assert_eq!(pieces.joined(), [b"aaaaaaaaaanew", &body[10..]].concat());
    }

    #[test]
    fn one_piece_is_joined_as_it_is() {
        let body = Bytes::from_static(b"{}");
        assert_eq!(Pieces::from(body.clone()).joined().as_ptr(), body.as_ptr());
        assert!(Pieces::from(Bytes::new()).is_empty());
        assert!(Pieces::default().joined().is_empty());
    }
}
