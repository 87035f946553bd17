//! Events are read as the host writes them.

use super::Event;
use crate::Usage;

#[test]
fn every_event_is_read() {
    let read = |json: &str| Event::read(json.as_bytes());
    let usage = |prompt, completion, cached| Usage {
        prompt_tokens: prompt,
        completion_tokens: completion,
        cached_tokens: cached,
    };
    let call = r#"{"event":"tool_call","at_ms":2,"number":0,"name":"say \"hi\""}"#;
    let end = r#"{"event":"end","at_ms":6,"outcome":"client_gone","status":499,"left_out":3}"#;
    let cases = [
        (r#"{"event":"first_token","at_ms":1}"#, Event::FirstToken { at_ms: 1 }),
        (call, Event::ToolCall { at_ms: 2, number: 0, name: "say \"hi\"".to_owned() }),
        (r#"{"event":"finish","at_ms":3,"reason":"stop"}"#, Event::Finish { at_ms: 3, reason: "stop".to_owned() }),
        (
            r#"{"event":"usage","at_ms":4,"prompt_tokens":9,"completion_tokens":8,"cached_tokens":7}"#,
            Event::Usage { at_ms: 4, usage: usage(Some(9), Some(8), Some(7)) },
        ),
        (
            r#"{"event":"usage","at_ms":5,"prompt_tokens":9}"#,
            Event::Usage { at_ms: 5, usage: usage(Some(9), None, None) },
        ),
        (end, Event::End { at_ms: 6, outcome: "client_gone".to_owned(), status: 499, left_out: 3 }),
        (r#"{"event":"first_token","at_ms":1,"more":true}"#, Event::FirstToken { at_ms: 1 }),
    ];
    for (json, event) in cases {
        assert_eq!(read(json), Some(event), "{json}");
    }
}

#[test]
fn what_is_not_known_is_no_event() {
    for json in ["", "{}", "null", r#"{"event":"coffee","at_ms":1}"#, r#"{"event":"finish","at_ms":1}"#] {
        assert_eq!(Event::read(json.as_bytes()), None, "{json}");
    }
}
