//! Numbers and texts to and from bytes.

/// Puts values one after another.
pub(super) struct Writer(Vec<u8>);

/// Takes values off the front of bytes. Everything is `None` where the bytes do not have it.
pub(super) struct Reader<'a>(&'a [u8]);

// === impl Writer ===

impl Writer {
    pub fn with_capacity(bytes: usize) -> Self {
        Self(Vec::with_capacity(bytes))
    }

    pub fn finish(self) -> Vec<u8> {
        self.0
    }

    pub fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    pub fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }

    pub fn u64(&mut self, value: u64) {
        self.bytes(&value.to_le_bytes());
    }

    /// A number of things that follow. Nothing here comes near four thousand millions.
    pub fn len(&mut self, count: usize) {
        self.u32(u32::try_from(count).unwrap_or(u32::MAX));
    }

    /// A text of at most 65535 bytes; of a longer one what fits.
    pub fn text(&mut self, text: &str) {
        let end = text.floor_char_boundary(usize::from(u16::MAX));
        let text = text.get(..end).unwrap_or_default();
        self.bytes(&u16::try_from(text.len()).unwrap_or(0).to_le_bytes());
        self.bytes(text.as_bytes());
    }
}

// === impl Reader ===

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    pub fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    pub fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(u8::from_le_bytes)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub fn flag(&mut self) -> Option<bool> {
        match self.u8()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    pub fn text(&mut self) -> Option<String> {
        let length = usize::from(self.array().map(u16::from_le_bytes)?);
        std::str::from_utf8(self.take(length)?).ok().map(str::to_owned)
    }

    /// A number of things of at least so many bytes each; none if there are not bytes enough for them.
    pub fn count(&mut self, least_bytes: usize) -> Option<usize> {
        let count = usize::try_from(self.u32()?).ok()?;
        (count.checked_mul(least_bytes)? <= self.0.len()).then_some(count)
    }
}
