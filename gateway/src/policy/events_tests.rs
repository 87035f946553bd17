#![allow(clippy::unwrap_used)]
//! What events look like.

use super::*;
use crate::policy::reference::EVENTS;
use serde_json::{Value, json};
use std::collections::BTreeSet;

fn ended() -> Ended<'static> {
    Ended {
        at_ms: 7,
        prompt_tokens: Some(3),
        completion_tokens: Some(2),
        cached_tokens: Some(1),
        outcome: "finished",
        status: 200,
        left_out: 4,
    }
}

fn all() -> Vec<Event> {
    let call = Happening::ToolCall { number: 2, name: "say \"hi\"".to_owned() };
    let finish = Happening::Finish { reason: "stop".to_owned() };
    let happenings = [Happening::FirstToken, call, finish];
    happenings.iter().map(|happening| Event::of(happening, 5)).chain(Event::last(&ended())).collect()
}

fn members(event: &Event) -> Value {
    serde_json::from_slice(&event.json).unwrap()
}

#[test]
fn an_event_is_its_name_its_time_and_what_it_is_about() {
    let told: Vec<Value> = all().iter().map(members).collect();
    let expected = [
        json!({"event": "first_token", "at_ms": 5}),
        json!({"event": "tool_call", "at_ms": 5, "number": 2, "name": "say \"hi\""}),
        json!({"event": "finish", "at_ms": 5, "reason": "stop"}),
        json!({"event": "usage", "at_ms": 7, "prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1}),
        json!({"event": "end", "at_ms": 7, "outcome": "finished", "status": 200, "left_out": 4}),
    ];
    assert_eq!(told, expected);
}

#[test]
fn what_the_worker_did_not_tell_is_not_there() {
    let none = Ended { prompt_tokens: None, completion_tokens: None, cached_tokens: None, ..ended() };
    assert_eq!(Event::last(&none).map(|event| event.kind).collect::<Vec<_>>(), [PluginEvent::End]);
    let some = Ended { completion_tokens: None, cached_tokens: None, ..ended() };
    let usage = Event::last(&some).next().unwrap();
    assert_eq!(members(&usage), json!({"event": "usage", "at_ms": 7, "prompt_tokens": 3}));
}

#[test]
fn the_reference_lists_every_event_with_its_members() {
    let events = all();
    assert_eq!(EVENTS.iter().map(|row| row.kind).collect::<Vec<_>>(), PluginEvent::ALL);
    for (row, event) in EVENTS.iter().zip(&events) {
        assert_eq!(row.kind, event.kind);
        let listed = row.members.iter().map(|(name, _)| name.trim_end_matches('?'));
        let listed: BTreeSet<&str> = listed.chain(["event", "at_ms"]).collect();
        let found = members(event);
        let found: BTreeSet<&str> = found.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(found, listed, "{}", row.kind.as_str());
        assert_eq!(members(event)["event"], row.kind.as_str());
    }
}

#[test]
fn a_set_holds_the_events_that_are_listed() {
    use PluginEvent::{End, Finish, FirstToken, ToolCall, Usage};
    for listed in [vec![], vec![Usage], vec![ToolCall, FirstToken], vec![End, End], PluginEvent::ALL.to_vec()] {
        let set = EventSet::of(&listed);
        assert_eq!(set.is_empty(), listed.is_empty());
        for event in PluginEvent::ALL {
            assert_eq!(set.contains(event), listed.contains(&event), "{listed:?} {event:?}");
        }
        let asked = Asked {
            first_token: listed.contains(&FirstToken),
            tool_call: listed.contains(&ToolCall),
            finish: listed.contains(&Finish),
        };
        assert_eq!(set.asked(), asked);
    }
    let both = EventSet::of(&[Usage]).with(EventSet::of(&[Finish]));
    assert_eq!(both, EventSet::of(&[Finish, Usage]));
}
