#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use bytes::Bytes;

use super::*;

fn headers(list: &[(&'static str, &str)]) -> HeaderMap {
    let mut map = HeaderMap::new();
    for (name, value) in list {
        map.append(*name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
    }
    map
}

fn who_on(route: Route, list: &[(&'static str, &str)], body: &str, session_id: Option<&str>) -> Identity {
    let members = scan(&Bytes::copy_from_slice(body.as_bytes())).unwrap();
    let control = SessionControl { session_id: session_id.map(String::from), ..SessionControl::default() };
    identify(route, &headers(list), &members, &control, &IdentityOptions::new(7))
}

/// Options as a configuration file with these lines gives them.
fn configured(lines: &str) -> IdentityOptions {
    let text = format!("{lines}\n[[pools]]\nworkers = [\"http://127.0.0.1:30000\"]\n");
    let config = turnstile_config::Config::parse(&text, "t.toml", std::path::Path::new(".")).unwrap();
    IdentityOptions::from_config(&config.sessions, 7)
}

fn who_with(options: &IdentityOptions, list: &[(&'static str, &str)], session_id: Option<&str>) -> Identity {
    let members = scan(&Bytes::from_static(b"{}")).unwrap();
    let control = SessionControl { session_id: session_id.map(String::from), ..SessionControl::default() };
    identify(Route::Chat, &headers(list), &members, &control, options)
}

fn who(list: &[(&'static str, &str)]) -> Identity {
    who_on(Route::Chat, list, "{}", None)
}

fn text(id: &Option<SessionId>) -> Option<&str> {
    id.as_ref().map(|id| id.text.as_str())
}

#[test]
fn what_is_said_outright_beats_every_header() {
    let list = [("x-dynamo-session-id", "d"), ("x-claude-code-session-id", "c"), ("x-session-id", "o")];
    let identity = who_on(Route::Chat, &list, "{}", Some("e"));
    assert_eq!((text(&identity.session), identity.source), (Some("e"), IdentitySource::Explicit));
    assert_eq!(text(&who(&list).session), Some("d"));
    assert_eq!(text(&who(&list[1..]).session), Some("c"));
    assert_eq!(text(&who(&list[2..]).session), Some("o"));
}

#[test]
fn dynamo_headers_name_session_parent_and_end() {
    let identity =
        who(&[("x-dynamo-session-id", " s "), ("x-dynamo-parent-session-id", "p"), ("x-dynamo-session-final", "True")]);
    assert_eq!(text(&identity.session), Some("s"));
    assert_eq!(text(&identity.parent), Some("p"));
    assert_eq!(text(&identity.tree), Some("p"));
    assert!(identity.session_final);
    assert_eq!(identity.agent, AgentKind::Dynamo);
    assert!(!who(&[("x-dynamo-session-id", "s"), ("x-dynamo-session-final", "no")]).session_final);
}

#[test]
fn a_parent_equal_to_the_session_is_no_parent() {
    let identity = who(&[("x-dynamo-session-id", "s"), ("x-dynamo-parent-session-id", "s")]);
    assert_eq!(identity.parent, None);
    assert_eq!(text(&identity.tree), Some("s"));
}

#[test]
fn a_sub_agent_of_claude_code_is_a_session_in_its_roots_tree() {
    let root = [("x-claude-code-session-id", "r")];
    let lead = who(&root);
    assert_eq!((text(&lead.session), text(&lead.tree), text(&lead.parent)), (Some("r"), Some("r"), None));
    let child = who(&[root[0], ("x-claude-code-agent-id", "a")]);
    assert_eq!((text(&child.session), text(&child.tree), text(&child.parent)), (Some("r/a"), Some("r"), Some("r")));
    let nested = who(&[root[0], ("x-claude-code-agent-id", "b"), ("x-claude-code-parent-agent-id", "a")]);
    assert_eq!(
        (text(&nested.session), text(&nested.tree), text(&nested.parent)),
        (Some("r/b"), Some("r"), Some("r/a"))
    );
    assert_eq!(child.tree, lead.tree);
    assert_eq!(nested.parent, child.session);
    // A team mate's id comes back in other sessions, where it is another conversation.
    let elsewhere = who(&[("x-claude-code-session-id", "q"), ("x-claude-code-agent-id", "a")]);
    assert_ne!(elsewhere.session, child.session);
}

#[test]
fn a_codex_thread_is_the_session_and_its_session_id_only_the_tree() {
    let identity = who(&[("thread-id", "t"), ("session-id", "r"), ("x-codex-parent-thread-id", "p")]);
    assert_eq!(
        (text(&identity.session), text(&identity.tree), text(&identity.parent)),
        (Some("t"), Some("r"), Some("p"))
    );
    assert_eq!(identity.agent, AgentKind::Codex);
    let identity = who(&[("session-id", "r")]);
    assert_eq!((text(&identity.session), text(&identity.tree)), (None, Some("r")));
    let identity = who(&[("session-id", "r"), ("x-session-affinity", "s")]);
    assert_eq!((text(&identity.session), identity.source), (Some("s"), IdentitySource::Header));
}

#[test]
fn older_codex_is_known_by_its_originator() {
    let identity = who(&[("originator", "codex_cli_rs"), ("session_id", "s")]);
    assert_eq!((text(&identity.session), identity.source), (Some("s"), IdentitySource::Codex));
    let identity = who(&[("originator", "codex_cli_rs"), ("session_id", "s"), ("conversation_id", "c")]);
    assert_eq!(text(&identity.session), Some("c"));
    assert_eq!(who(&[("session_id", "s")]).source, IdentitySource::None);
}

#[test]
fn open_code_names_its_session_and_parent() {
    let identity = who(&[("x-session-id", "ses_1"), ("x-parent-session-id", "ses_0"), ("user-agent", "opencode/1.0")]);
    assert_eq!((text(&identity.session), text(&identity.parent)), (Some("ses_1"), Some("ses_0")));
    assert_eq!((identity.agent, identity.source), (AgentKind::OpenCode, IdentitySource::OpenCode));
}

#[test]
fn configured_headers_are_asked_in_order() {
    let options = configured(r#"sessions.id_headers = ["x-second", "x-first"]"#);
    let identity = who_with(&options, &[("x-first", "1"), ("x-second", "2"), ("x-task-id", "3")], None);
    assert_eq!((text(&identity.session), identity.source), (Some("2"), IdentitySource::Header));
    let identity = who_with(&options, &[("x-task-id", "3"), ("x-dynamo-session-id", "4")], None);
    assert_eq!((text(&identity.session), identity.source), (None, IdentitySource::None));
}

#[test]
fn a_configured_family_says_all_that_a_known_one_can() {
    let options = configured(
        r#"
        [sessions]
        id_headers = [
            { session = "X-Run", parent = "x-run-parent", tree = "x-job", last = "x-run-end", with = "x-runner" },
            { session = "x-team", agent = "x-member", parent = "x-lead", tree = "x-org" },
        ]"#,
    );
    let run = [("x-run", "r"), ("x-run-parent", "p"), ("x-job", "j"), ("x-run-end", " TRUE"), ("x-runner", "")];
    let identity = who_with(&options, &run, None);
    assert_eq!(
        (text(&identity.session), text(&identity.tree), text(&identity.parent)),
        (Some("r"), Some("j"), Some("p"))
    );
    assert!(identity.session_final);
    assert_eq!((identity.source, identity.agent), (IdentitySource::Header, AgentKind::Other));
    let identity = who_with(&options, &run[..4], None);
    assert_eq!((identity.session, identity.tree, identity.session_final), (None, None, false));

    let team = [("x-team", "t"), ("x-member", "m"), ("x-lead", "l"), ("x-org", "o")];
    let identity = who_with(&options, &team, None);
    assert_eq!(
        (text(&identity.session), text(&identity.tree), text(&identity.parent)),
        (Some("t/m"), Some("o"), Some("t/l"))
    );
    let identity = who_with(&options, &team[..2], None);
    assert_eq!((text(&identity.tree), text(&identity.parent)), (Some("t"), Some("t")));
    let identity = who_with(&options, &[team[0], team[2]], None);
    assert_eq!((text(&identity.session), text(&identity.parent)), (Some("t"), None), "a lead is an agent's");
    let identity = who_with(&options, &team[1..3], None);
    assert_eq!((text(&identity.session), text(&identity.parent)), (Some("m"), Some("l")));
    let identity = who_with(&options, &team[3..], None);
    assert_eq!((text(&identity.session), text(&identity.tree)), (None, Some("o")));
}

#[test]
fn without_families_only_the_body_names_a_session() {
    let options = configured("sessions.id_headers = []");
    let every: Vec<_> = turnstile_config::IdHeaders::known_clients()
        .into_iter()
        .flat_map(|f| [Some(f.session), f.agent, f.parent, f.tree, f.last, f.with])
        .flatten()
        .collect();
    let mut map = HeaderMap::new();
    for name in &every {
        map.insert(HeaderName::from_bytes(name.as_str().as_bytes()).unwrap(), HeaderValue::from_static("1"));
    }
    let members = scan(&Bytes::from_static(b"{}")).unwrap();
    let identity = identify(Route::Chat, &map, &members, &SessionControl::default(), &options);
    assert_eq!((identity.session, identity.tree, identity.parent), (None, None, None));
    assert_eq!((identity.source, identity.session_final), (IdentitySource::None, false));
    let identity = who_with(&options, &[("x-dynamo-parent-session-id", "p")], Some("e"));
    assert_eq!((text(&identity.session), identity.source), (Some("e"), IdentitySource::Explicit));
    assert_eq!((text(&identity.tree), identity.parent), (Some("e"), None));
}

#[test]
fn a_session_in_the_body_takes_the_rest_from_one_family() {
    let list = [("x-dynamo-parent-session-id", "p"), ("x-dynamo-session-final", "1"), ("session-id", "r")];
    let identity = who_on(Route::Chat, &list, "{}", Some("e"));
    assert_eq!((text(&identity.parent), text(&identity.tree)), (Some("p"), Some("p")));
    assert!(identity.session_final);
    let identity = who_on(Route::Chat, &list[2..], "{}", Some("e"));
    assert_eq!((text(&identity.parent), text(&identity.tree)), (None, Some("r")));
    assert!(!identity.session_final);
    let agent = [("x-claude-code-agent-id", "a"), ("x-claude-code-parent-agent-id", "b")];
    let identity = who_on(Route::Chat, &agent, "{}", Some("e"));
    assert_eq!((text(&identity.parent), text(&identity.tree)), (None, Some("e")));
}

#[test]
fn no_configured_family_is_lost() {
    let every = ('a'..='z').chain('0'..='9').chain(['-', '_', '.']).collect::<String>();
    let options = configured(&format!("sessions.id_headers = [\"{every}\"]"));
    assert_eq!(options.families.len(), 1, "all characters of a configured name make a header name");
    let known = turnstile_config::IdHeaders::known_clients();
    assert_eq!(IdentityOptions::new(7).families.len(), known.len());
}

#[test]
fn the_longest_id_is_the_configured_one() {
    let options = configured("sessions.id_max_bytes = 20");
    let long = "x".repeat(21);
    for (name, longest) in [("x-session-id", &long[..20]), ("session-id", &long[..20])] {
        let identity = who_with(&options, &[(name, longest)], None);
        assert_eq!((text(&identity.tree), identity.malformed_headers), (Some(longest), 0), "{name}");
        let identity = who_with(&options, &[(name, &long)], None);
        assert_eq!((text(&identity.tree), identity.malformed_headers), (None, 1), "{name}");
    }
    let members = scan(&Bytes::from(format!(r#"{{"prompt_cache_key":"{long}"}}"#))).unwrap();
    let body_key =
        |options| identify(Route::Chat, &HeaderMap::new(), &members, &SessionControl::default(), options).tree;
    assert_eq!(body_key(&options), None);
    assert_eq!(text(&body_key(&IdentityOptions::new(7))), Some(long.as_str()));
}

#[test]
fn request_ids_trace_ids_and_users_are_never_a_session() {
    let identity = who_on(
        Route::Chat,
        &[
            ("x-request-id", "1"),
            ("x-client-request-id", "2"),
            ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
            ("x-codex-installation-id", "3"),
        ],
        r#"{"user":"u","safety_identifier":"x","metadata":{"user_id":"{\"session_id\":\"s\"}"}}"#,
        None,
    );
    assert_eq!((identity.session, identity.tree, identity.source), (None, None, IdentitySource::None));
}

#[test]
fn a_prompt_cache_key_names_a_tree_but_no_session() {
    let body = r#"{"prompt_cache_key":"k"}"#;
    let identity = who_on(Route::Responses, &[], body, None);
    assert_eq!((text(&identity.session), text(&identity.tree)), (None, Some("k")));
    assert_eq!(identity.source, IdentitySource::PromptCacheKey);
    let identity = who_on(Route::Responses, &[("thread-id", "t")], body, None);
    assert_eq!(text(&identity.tree), Some("t"));
}

#[test]
fn anthropic_metadata_names_a_tree() {
    for (user_id, tree) in [
        (r#"{\"device_id\":\"d\",\"session_id\":\"s\"}"#, Some("s")),
        (r#"{\"session_id\":\"s\",\"parent_session_id\":\"p\"}"#, Some("p")),
        ("user_0a_account_0b_session_0c-1", Some("0c-1")),
        ("somebody", None),
        (r#"{\"session_id\":5}"#, None),
        (r#"{broken"#, None),
    ] {
        let body = format!("{{\"metadata\":{{\"user_id\":\"{user_id}\"}}}}");
        let identity = who_on(Route::Messages, &[], &body, None);
        assert_eq!((text(&identity.session), text(&identity.tree)), (None, tree), "{user_id}");
    }
}

#[test]
fn empty_ids_are_absent_and_overlong_ones_ignored_and_counted() {
    let long = "x".repeat(257);
    let identity = who(&[("x-dynamo-session-id", "  "), ("x-session-id", &long)]);
    assert_eq!((text(&identity.session), identity.malformed_headers), (None, 1));
    let identity = who(&[("x-dynamo-session-id", &long[..256])]);
    assert_eq!(identity.malformed_headers, 0);
    assert!(identity.session.is_some());
}

#[test]
fn a_key_is_one_tenant_in_either_header() {
    let bearer = who(&[("authorization", "Bearer sk-1")]);
    assert_eq!(bearer.tenant, who(&[("authorization", "bearer  sk-1 ")]).tenant);
    assert_eq!(bearer.tenant, who(&[("x-api-key", "sk-1")]).tenant);
    assert_ne!(bearer.tenant, who(&[("x-api-key", "sk-2")]).tenant);
    assert_eq!(who(&[]).tenant, ANONYMOUS);
    assert_eq!(who(&[("authorization", "Bearer ")]).tenant, ANONYMOUS);
    assert_ne!(tenant_of(&headers(&[("x-api-key", "sk-1")]), 8), bearer.tenant);
}

#[test]
fn one_name_is_another_session_for_another_tenant() {
    let one = who(&[("x-session-id", "s"), ("x-api-key", "a")]);
    let two = who(&[("x-session-id", "s"), ("x-api-key", "b")]);
    assert_ne!(one.session.as_ref().unwrap().key, two.session.unwrap().key);
    assert_eq!(one.session.unwrap().key, session_key(7, one.tenant, "s"));
}

#[test]
fn the_kind_of_work_is_read_from_the_clients_own_words() {
    for (name, word, class) in [
        ("x-claude-code-request-class", "compaction", Some(RequestClass::Compaction)),
        ("x-claude-code-request-class", "main", Some(RequestClass::Main)),
        ("x-claude-code-request-class", "new-word", None),
        ("x-openai-subagent", "compact", Some(RequestClass::Compaction)),
        ("x-openai-subagent", "memory_consolidation", Some(RequestClass::Auxiliary)),
        ("x-openai-subagent", "review", Some(RequestClass::Subagent)),
        ("x-openai-subagent", "collab_spawn", Some(RequestClass::Subagent)),
    ] {
        assert_eq!(who(&[(name, word)]).request_class, class, "{name}: {word}");
    }
}
