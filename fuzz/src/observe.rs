//! The observer of answers.

use bytes::Bytes;
use turnstile_fleet::observe::{
    Asked, FirstEvent, Happening, MOST_OF_A_KIND, Observation, ObserveOptions, Observer, WorkerError,
};
use turnstile_fleet::reply::Reply;

use super::input::{Numbers, first_line, route};

/// What came out of one run.
#[derive(Debug, PartialEq)]
struct Seen {
    out: Vec<u8>,
    observation: Observation,
    first: Option<Option<WorkerError>>,
    reply: Option<Reply>,
    happenings: Vec<Happening>,
}

/// However an answer is split, it comes out the same and is understood the same, and no more of it is held than allowed. The
/// first line names the route and any of `json`, `usage`, `details`, `asked`, `clean`, `reply`, `tight`, `events`; the
/// rest is the answer.
pub fn sse_observe(data: &[u8]) {
    let (line, answer) = first_line(data);
    let says = |flag: &str| line.split_ascii_whitespace().any(|word| word == flag);
    let (stream, route) = (!says("json"), route(&line));
    let tight = says("tight");
    let options = ObserveOptions {
        strip_usage: says("usage"),
        strip_cached_details: says("details"),
        cached_details_asked: says("asked"),
        clean_errors: says("clean"),
        collect_reply: says("reply"),
        asked: Asked { first_token: says("events"), tool_call: says("events"), finish: says("events") },
        max_reply_bytes: if tight { 48 } else { 1 << 20 },
        max_event_bytes: if tight { 160 } else { 1 << 20 },
        max_body_bytes: if tight { 400 } else { 1 << 20 },
    };
    let bound = if stream { options.max_event_bytes } else { options.max_body_bytes };
    let run = |cuts: &mut dyn FnMut(usize) -> usize| {
        let mut observer = Observer::new(route, stream, options.clone());
        let answer = Bytes::copy_from_slice(answer);
        let mut parts = Vec::new();
        let mut held = Vec::new();
        let mut at = 0;
        while at < answer.len() {
            let length = cuts(answer.len() - at).clamp(1, answer.len() - at);
            observer.push(answer.slice(at..at + length), &mut parts);
            at += length;
            // A cleaned message can be longer than it was.
            held.push(at.saturating_sub(parts.iter().map(Bytes::len).sum::<usize>()));
        }
        observer.finish(&mut parts);
        let out = parts.concat();
        // What is taken out does not come later, so it is not held.
        let taken = answer.len().saturating_sub(out.len());
        assert!(held.iter().all(|held| *held <= bound + taken), "held {held:?}, bound {bound}, taken out {taken}");
        if !observer.may_change_length() {
            // A document is held to its end, up to the bound, for it may still be replaced.
            assert!(!stream || held.iter().all(|held| *held == 0));
            assert_eq!(out, answer);
        }
        let first = match observer.first_event() {
            FirstEvent::None => None,
            FirstEvent::Data => Some(None),
            FirstEvent::Error(error) => Some(Some(error.clone())),
        };
        let happenings = observer.take_happenings();
        Seen { out, observation: observer.observation().clone(), first, reply: observer.take_reply(), happenings }
    };

    let whole = run(&mut |rest| rest);
    bounded(&whole, &options);
    let mut numbers = Numbers::of(data);
    let mut splits: Vec<Box<dyn FnMut(usize) -> usize>> = vec![
        Box::new(|_| 1),
        Box::new({
            let first = numbers.below(answer.len().max(1));
            let mut begun = false;
            move |rest| if std::mem::replace(&mut begun, true) { rest } else { first }
        }),
        Box::new(move |_| 1 + numbers.below(40)),
    ];
    for split in &mut splits {
        let other = run(split);
        assert_eq!(other, whole, "another split");
    }
}

fn bounded(seen: &Seen, options: &ObserveOptions) {
    let observation = &seen.observation;
    assert!(observation.tool_calls.len() <= 64);
    assert!(observation.tool_calls.iter().all(|name| name.len() <= 128));
    assert!(observation.finish_reason.as_ref().is_none_or(|reason| reason.len() <= 64));
    assert!(observation.error.as_ref().is_none_or(|error| error.message.len() <= 512));
    assert!(seen.happenings.len() <= 1 + 2 * MOST_OF_A_KIND);
    assert!(seen.happenings.iter().skip(1).all(|one| *one != Happening::FirstToken));
    assert!(seen.happenings.iter().all(|one| match one {
        Happening::FirstToken => true,
        Happening::ToolCall { name, .. } => name.len() <= 128,
        Happening::Finish { reason } => reason.len() <= 64,
    }));
    if let Some(reply) = &seen.reply {
        let calls: usize = reply.tool_calls.iter().map(|c| c.id.len() + c.name.len() + c.arguments.len()).sum();
        let text = [&reply.content, &reply.reasoning_content].into_iter().flatten().map(String::len).sum::<usize>();
        assert!(calls + text <= options.max_reply_bytes);
        assert!(observation.error.is_none());
    }
}
