#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;

#[test]
fn pieces_make_a_message() {
    let mut builder = ReplyBuilder::new(100);
    builder.reasoning("hm");
    builder.content("a");
    builder.content("b");
    builder.tool_call(1, "c2", "g", "");
    builder.tool_call(0, "c1", "f", "{\"x\"");
    builder.tool_call(0, "", "", ":1}");
    builder.finished("tool_calls");
    let reply = builder.build().unwrap();
    assert_eq!(reply.content.as_deref(), Some("ab"));
    assert_eq!(reply.reasoning_content.as_deref(), Some("hm"));
    let call = |id: &str, name: &str, arguments: &str| ToolCall {
        id: id.into(),
        name: name.into(),
        arguments: arguments.into(),
    };
    assert_eq!(reply.tool_calls, [call("c1", "f", "{\"x\":1}"), call("c2", "g", "")]);
    assert_eq!(reply.finish_reason, "tool_calls");
}

#[test]
fn an_unfinished_aborted_overlong_or_damaged_message_is_none() {
    let mut unfinished = ReplyBuilder::new(100);
    unfinished.content("a");
    assert_eq!(unfinished.build(), None);
    let mut aborted = ReplyBuilder::new(100);
    aborted.finished("abort");
    assert_eq!(aborted.build(), None);
    let mut long = ReplyBuilder::new(3);
    long.content("ab");
    long.content("cd");
    long.content("");
    long.finished("stop");
    assert_eq!(long.build(), None);
    let mut gap = ReplyBuilder::new(100);
    gap.tool_call(1, "c", "f", "");
    gap.finished("stop");
    assert_eq!(gap.build(), None);
    let mut many = ReplyBuilder::new(100);
    many.tool_call(u64::MAX, "c", "f", "");
    many.finished("stop");
    assert_eq!(many.build(), None);
}
