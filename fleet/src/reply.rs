//! The assistant message of a chat answer, put together from its chunks. Only a speculative prefill needs it.

/// A finished assistant message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The text; none if there was none, as in most tool-calling turns.
    pub content: Option<String>,
    /// The reasoning, which clients do not send back and templates drop.
    pub reasoning_content: Option<String>,
    /// The tool calls in order.
    pub tool_calls: Vec<ToolCall>,
    /// Why it ended: `stop`, `length`, `tool_calls`, …
    pub finish_reason: String,
}

/// One tool call of a message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolCall {
    /// The id that the tool's result will name.
    pub id: String,
    /// The function's name.
    pub name: String,
    /// The arguments as the model wrote them: JSON text, usually.
    pub arguments: String,
}

/// Most tool calls gathered of one message.
const MAX_TOOL_CALLS: u64 = 256;

/// Gathers a message.
pub(crate) struct ReplyBuilder {
    content: String,
    reasoning: String,
    tool_calls: Vec<ToolCall>,
    finish_reason: Option<String>,
    /// Bytes that may still come.
    room: usize,
    /// There is no message to build: more than one answer, or too long.
    spoiled: bool,
}

impl ReplyBuilder {
    pub(crate) fn new(max_bytes: usize) -> Self {
        Self {
            content: String::new(),
            reasoning: String::new(),
            tool_calls: Vec::new(),
            finish_reason: None,
            room: max_bytes,
            spoiled: false,
        }
    }

    pub(crate) fn spoil(&mut self) {
        self.spoiled = true;
        self.content = String::new();
        self.reasoning = String::new();
        self.tool_calls = Vec::new();
    }

    pub(crate) fn content(&mut self, text: &str) {
        if self.takes(text) {
            self.content.push_str(text);
        }
    }

    pub(crate) fn reasoning(&mut self, text: &str) {
        if self.takes(text) {
            self.reasoning.push_str(text);
        }
    }

    /// Adds to the tool call at `index`. Its id and name come once, its arguments in pieces.
    pub(crate) fn tool_call(&mut self, index: u64, id: &str, name: &str, arguments: &str) {
        if index >= MAX_TOOL_CALLS {
            return self.spoil();
        }
        if !(self.takes(id) && self.takes(name) && self.takes(arguments)) {
            return;
        }
        let index = index as usize;
        while self.tool_calls.len() <= index {
            self.tool_calls.push(ToolCall::default());
        }
        if let Some(call) = self.tool_calls.get_mut(index) {
            call.id.push_str(id);
            call.name.push_str(name);
            call.arguments.push_str(arguments);
        }
    }

    pub(crate) fn finished(&mut self, reason: &str) {
        self.finish_reason = Some(reason.to_owned());
    }

    /// The message, if it is whole.
    pub(crate) fn build(self) -> Option<Reply> {
        let finish_reason = self.finish_reason.filter(|reason| reason != "abort")?;
        let whole = !self.spoiled && self.tool_calls.iter().all(|call| !call.name.is_empty());
        whole.then(|| Reply {
            content: Some(self.content).filter(|text| !text.is_empty()),
            reasoning_content: Some(self.reasoning).filter(|text| !text.is_empty()),
            tool_calls: self.tool_calls,
            finish_reason,
        })
    }

    fn takes(&mut self, text: &str) -> bool {
        if self.spoiled {
            return false;
        }
        match self.room.checked_sub(text.len()) {
            Some(room) => {
                self.room = room;
                true
            }
            None => {
                self.spoil();
                false
            }
        }
    }
}

#[cfg(test)]
#[path = "reply_tests.rs"]
mod tests;
