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

#[test]
fn each_protocol_gets_its_own_shape() {
    let refusal = Refusal::new(Kind::BadRequest, "nvext must be an object").with_param("nvext");
    let parse = |p| serde_json::from_slice::<serde_json::Value>(&refusal.body(p)).unwrap();
    let openai = parse(Protocol::OpenAi);
    assert_eq!(openai["error"]["param"], "nvext");
    assert_eq!(openai["error"]["type"], "invalid_request_error");
    let anthropic = parse(Protocol::Anthropic);
    assert_eq!(anthropic["type"], "error");
    assert_eq!(anthropic["error"]["message"], "nvext must be an object");
    assert_eq!(parse(Protocol::Native)["error"]["message"], "nvext must be an object");
}
