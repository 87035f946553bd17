#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;

#[test]
fn every_route_is_found_by_the_path_the_worker_serves() {
    for route in Route::ALL {
        assert_eq!(Route::from_path(route.worker_path()), Some(route));
    }
    assert_eq!(Route::from_path("/v1/tokenize"), Some(Route::Tokenize));
    assert_eq!(Route::from_path("/v1/detokenize"), Some(Route::Detokenize));
}

#[test]
fn administrative_session_and_inexact_paths_are_no_route() {
    for path in [
        "/",
        "",
        "/open_session",
        "/close_session",
        "/flush_cache",
        "/server_info",
        "/v1/chat/completions/",
        "//generate",
        "/v1/models",
        "/V1/chat/completions",
    ] {
        assert_eq!(Route::from_path(path), None, "{path}");
    }
}

#[test]
fn session_params_reach_only_generate() {
    let taking: Vec<_> = Route::ALL.into_iter().filter(|r| r.takes_session_params()).collect();
    assert_eq!(taking, [Route::Generate]);
}

#[test]
fn messages_take_neither_priority_nor_session_id_nor_rid() {
    assert!(!Route::Messages.takes_priority());
    assert!(!Route::Messages.takes_session_id());
    assert_eq!(Route::Messages.takes_rid(), None);
    assert!(!Route::Responses.takes_priority());
    assert!(Route::Responses.takes_session_id());
    assert_eq!(Route::Responses.takes_rid(), Some("request_id"));
}

#[test]
fn names_are_distinct_labels() {
    let mut names: Vec<_> = Route::ALL.into_iter().map(Route::name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), Route::ALL.len());
}
