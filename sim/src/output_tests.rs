#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;
use serde_json::json;

fn limits(max_new_tokens: usize) -> Limits {
    Limits { max_new_tokens, ..Limits::default() }
}

fn answer(prompt: &str, max_new_tokens: usize) -> Plan {
    plan(&SimConfig::default(), &encode(prompt), &Script::parse(prompt), &limits(max_new_tokens))
}

#[test]
fn directives_are_read_in_any_place() {
    let script = Script::parse("please [[sim:tokens=20]] and [[sim:tool=read {\"a\":[[1]]}]] [[sim:think=9]]");
    assert_eq!(script.tokens, Some(20));
    assert_eq!(script.think, Some(9));
    assert_eq!(script.tools, [("read".to_owned(), json!({"a": [[1]]}))]);
}

#[test]
fn the_same_prompt_gives_the_same_answer_and_another_one_another() {
    assert_eq!(answer("hi", 100), answer("hi", 100));
    assert_ne!(answer("hi", 100), answer("ho", 100));
}

#[test]
fn a_scripted_length_is_exact_and_stops_by_itself() {
    let plan = answer("[[sim:tokens=200]]", 1000);
    assert_eq!((plan.ids.len(), &plan.ending), (200, &Ending::EndToken(Special::ImEnd.id())));
}

#[test]
fn the_limit_cuts_an_answer() {
    let plan = answer("[[sim:tokens=200]]", 50);
    assert_eq!((plan.ids.len(), plan.ending), (50, Ending::Length));
    assert!(answer("hi", 0).ids.is_empty());
}

#[test]
fn ignoring_the_end_fills_the_limit() {
    let filled = Limits { max_new_tokens: 333, ignore_eos: true, stop: Vec::new() };
    for prompt in ["hi", "[[sim:think=9]]", "[[sim:text=short]]", "[[sim:tool=f {}]]"] {
        let plan = plan(&SimConfig::default(), &encode(prompt), &Script::parse(prompt), &filled);
        assert_eq!((plan.ids.len(), plan.ending), (333, Ending::Length), "{prompt}");
    }
}

#[test]
fn reasoning_comes_first_and_is_counted_with_its_markers() {
    let plan = answer("[[sim:think=30]][[sim:tokens=5]]", 100);
    assert_eq!((plan.ids.len(), plan.reasoning_tokens), (35, 30));
    assert_eq!(plan.ids.first(), Some(&Special::ThinkStart.id()));
    assert_eq!(plan.ids.get(29), Some(&Special::ThinkEnd.id()));
}

#[test]
fn a_stop_string_ends_the_answer() {
    let stop = Limits { stop: vec!["two".to_owned()], ..limits(100) };
    let plan = plan(&SimConfig::default(), &[], &Script::parse("[[sim:text=one two three]]"), &stop);
    assert_eq!(plan.ending, Ending::StopText("two".to_owned()));
    assert_eq!(decode(&plan.ids), "one two");
}

#[test]
fn an_answer_put_back_into_a_prompt_has_the_same_tokens() {
    for prompt in ["hi", "[[sim:think=9]]", "[[sim:tool=f {\"a\": 1}]] [[sim:tokens=9]]"] {
        let plan = answer(prompt, 1000);
        assert_eq!(encode(&decode(&plan.ids)), plan.ids);
    }
}
