//! The work we gave a worker and have not got back.

/// Our turns on one worker, summed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Flights {
    in_flight: u32,
    unanswered: u32,
    pending_prefill_tokens: u64,
    expected_decode_tokens: u64,
}

/// One turn of ours on a worker, from its dispatch to its end. It is given back to [`Flights::finish`] of the same worker,
/// so that the sums return to zero.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a flight that is not finished counts for ever"]
pub struct Flight {
    answered: bool,
    pending_prefill_tokens: u64,
    expected_decode_tokens: u64,
}

// === impl Flights ===

impl Flights {
    /// A turn is about to be sent. `uncached_tokens`: what the worker will have to prefill, as estimated. `osl`: output
    /// tokens that the client expects, 0 if it did not say; they count until the turn ends.
    pub fn dispatch(&mut self, uncached_tokens: u64, osl: u64) -> Flight {
        self.in_flight = self.in_flight.saturating_add(1);
        self.pending_prefill_tokens = self.pending_prefill_tokens.saturating_add(uncached_tokens);
        self.expected_decode_tokens = self.expected_decode_tokens.saturating_add(osl);
        self.unanswered = self.unanswered.saturating_add(1);
        Flight { answered: false, pending_prefill_tokens: uncached_tokens, expected_decode_tokens: osl }
    }

    /// The first byte of the answer came: its prefill is done. Later calls change nothing.
    pub fn first_byte(&mut self, flight: &mut Flight) {
        if !std::mem::replace(&mut flight.answered, true) {
            self.unanswered = self.unanswered.saturating_sub(1);
        }
        let done = std::mem::take(&mut flight.pending_prefill_tokens);
        self.pending_prefill_tokens = self.pending_prefill_tokens.saturating_sub(done);
    }

    /// The turn ended, in whatever way.
    pub fn finish(&mut self, mut flight: Flight) {
        self.first_byte(&mut flight);
        self.in_flight = self.in_flight.saturating_sub(1);
        self.expected_decode_tokens = self.expected_decode_tokens.saturating_sub(flight.expected_decode_tokens);
    }

    /// Turns in flight without a first byte.
    pub fn unanswered(&self) -> u32 {
        self.unanswered
    }

    /// Turns in flight.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Estimated uncached tokens of the turns that have not answered yet.
    pub fn pending_prefill_tokens(&self) -> u64 {
        self.pending_prefill_tokens
    }

    /// Sum of `osl` over the turns in flight.
    pub fn expected_decode_tokens(&self) -> u64 {
        self.expected_decode_tokens
    }
}
