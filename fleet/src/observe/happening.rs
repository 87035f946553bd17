//! What happens in an answer, one thing after another, kept for whoever asked. Names and reasons only: nothing of what was
//! generated.

/// The most of one kind that is kept of an answer.
pub const MOST_OF_A_KIND: usize = 64;

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Happening {
    /// A stream carried its first token. It comes before anything else.
    FirstToken,
    /// A tool is called.
    ToolCall {
        /// Its place among the calls of the answer, from 0.
        number: u32,
        /// Its name, at most 128 bytes.
        name: String,
    },
    /// Generation ended. Of several answers each says so.
    Finish {
        /// Why, in the protocol's own word, at most 64 bytes.
        reason: String,
    },
}

/// What is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// [`Happening::FirstToken`].
    pub first_token: bool,
    /// [`Happening::ToolCall`].
    pub tool_call: bool,
    /// [`Happening::Finish`].
    pub finish: bool,
}

/// What has happened and nobody took yet.
#[derive(Debug, Default)]
pub(super) struct Heard {
    asked: Asked,
    waiting: Vec<Happening>,
    had_token: bool,
    tool_calls: u32,
    finishes: usize,
}

impl Heard {
    /// `stream`: only streams have a first token.
    pub(super) fn new(asked: Asked, stream: bool) -> Self {
        Self { asked, had_token: !stream, ..Self::default() }
    }

    pub(super) fn take(&mut self) -> Vec<Happening> {
        std::mem::take(&mut self.waiting)
    }

    /// Whether the first token matters and has not come.
    pub(super) fn awaits_token(&self) -> bool {
        self.asked.first_token && !self.had_token
    }

    /// Tokens were generated.
    pub(super) fn token(&mut self) {
        if !std::mem::replace(&mut self.had_token, true) && self.asked.first_token {
            self.waiting.push(Happening::FirstToken);
        }
    }

    /// A tool is called, which is told by tokens. False if it is left out.
    pub(super) fn tool_call(&mut self, name: &str) -> bool {
        self.token();
        let number = self.tool_calls;
        self.tool_calls = number.saturating_add(1);
        if !self.asked.tool_call {
            return true;
        }
        let fits = (number as usize) < MOST_OF_A_KIND;
        if fits {
            self.waiting.push(Happening::ToolCall { number, name: name.to_owned() });
        }
        fits
    }

    /// Generation ended. False if it is left out.
    pub(super) fn finish(&mut self, reason: &str) -> bool {
        if !self.asked.finish {
            return true;
        }
        let fits = self.finishes < MOST_OF_A_KIND;
        if fits {
            self.finishes += 1;
            self.waiting.push(Happening::Finish { reason: reason.to_owned() });
        }
        fits
    }
}
