#![allow(clippy::unwrap_used, clippy::panic)]
use super::*;
use std::collections::HashSet;

#[test]
fn every_kind_has_its_own_code_and_an_error_status() {
    let mut codes = HashSet::new();
    for kind in Kind::ALL {
        let row = kind.row();
        assert!(codes.insert(row.code), "{} twice", row.code);
        assert!((400..600).contains(&row.status), "{kind:?}");
        assert!(row.code.chars().all(|c| c.is_ascii_lowercase() || c == '_'), "{kind:?} is a metric label");
    }
}

#[test]
fn blame_goes_with_the_status_class() {
    for kind in Kind::ALL {
        let row = kind.row();
        assert_eq!(row.blame == Blame::Client, row.status < 500, "{kind:?}");
    }
}

const PROTOCOLS: [Protocol; 4] = [Protocol::OpenAi, Protocol::Responses, Protocol::Anthropic, Protocol::Native];

fn parse(bytes: &[u8]) -> serde_json::Value {
    serde_json::from_slice(bytes).unwrap()
}

/// What a client of the protocol reads: message, type, code.
fn read(protocol: Protocol, body: &serde_json::Value) -> (String, Option<String>, Option<String>) {
    let text = |value: &serde_json::Value| value.as_str().map(str::to_owned);
    let error = &body["error"];
    if protocol == Protocol::Anthropic {
        assert_eq!(body["type"], "error");
        assert_eq!(body.as_object().unwrap().len(), 2, "{body}");
    } else {
        assert_eq!(body.as_object().unwrap().len(), 1, "{body}");
    }
    (text(&error["message"]).unwrap(), text(&error["type"]), text(&error["code"]))
}

#[test]
fn every_kind_has_its_shape_in_every_protocol() {
    for kind in Kind::ALL {
        let row = kind.row();
        let refusal = Refusal::new(kind, "why").with_param("field");
        for protocol in PROTOCOLS {
            let (message, error_type, code) = read(protocol, &parse(&refusal.body(protocol)));
            let (wanted_type, wanted_code) = match protocol {
                Protocol::Anthropic => (Some(row.anthropic), None),
                Protocol::Native => (None, Some(row.code)),
                _ => (Some(row.openai), Some(row.code)),
            };
            assert!(message.ends_with("why"), "{kind:?} {protocol:?}");
            assert_eq!((error_type.as_deref(), code.as_deref()), (wanted_type, wanted_code), "{kind:?} {protocol:?}");
        }
        assert_eq!(parse(&refusal.body(Protocol::OpenAi))["error"]["param"], "field");
    }
}

#[test]
fn overload_as_429_has_the_type_that_goes_with_it() {
    for kind in Kind::ALL.into_iter().filter(|kind| kind.is_overload()) {
        let refusal = Refusal::new(kind, "why").with_status(429);
        for protocol in [Protocol::OpenAi, Protocol::Responses, Protocol::Anthropic] {
            assert_eq!(read(protocol, &parse(&refusal.body(protocol))).1.as_deref(), Some("rate_limit_error"));
        }
    }
}

#[test]
fn a_prompt_that_is_too_long_is_told_in_the_words_clients_know() {
    let refusal = Refusal::new(Kind::ContextLength, "5 tokens of 4");
    let of = |protocol| read(protocol, &parse(&refusal.body(protocol)));
    assert_eq!(of(Protocol::OpenAi).2.as_deref(), Some("context_length_exceeded"));
    assert_eq!(of(Protocol::Anthropic).0, "prompt is too long: 5 tokens of 4");
}

#[test]
fn a_broken_stream_is_told_by_an_event_of_its_protocol() {
    let refusal = Refusal::new(Kind::BrokenOff, "gone");
    for protocol in PROTOCOLS {
        let event = String::from_utf8(refusal.event(protocol).to_vec()).unwrap();
        let (name, data) = match event.split_once("data: ") {
            Some((name, data)) => (name.trim_end().to_owned(), data),
            None => panic!("{event}"),
        };
        let data = parse(data.strip_suffix("\n\n").unwrap().as_bytes());
        match protocol {
            Protocol::Responses => {
                assert_eq!((name.as_str(), &data["type"]), ("event: error", &"error".into()));
                assert_eq!((&data["code"], &data["message"]), (&"broken_off".into(), &"gone".into()));
            }
            Protocol::Anthropic => {
                assert_eq!((name.as_str(), &data["error"]["type"]), ("event: error", &"api_error".into()));
            }
            _ => assert_eq!((name.as_str(), &data["error"]["code"]), ("", &"broken_off".into())),
        }
    }
}

#[test]
fn the_page_has_every_kind() {
    let page = page();
    for kind in Kind::ALL {
        assert!(page.contains(&format!("| `{}` | {}", kind.row().code, kind.row().status)), "{kind:?}");
    }
}
