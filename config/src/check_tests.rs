#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;

use crate::{Config, Errors, OnError, Phase, PluginEvent};

const MINIMAL: &str = "[[pools]]\nworkers = [\"http://10.0.0.1:30000\"]\n";

fn parse(text: &str) -> Result<Config, Errors> {
    Config::parse(text, "t.toml", Path::new("."))
}

/// The problems of a text, each as one line.
fn problems(text: &str) -> Vec<String> {
    parse(text).expect_err("the text is wrong").problems.iter().map(ToString::to_string).collect()
}

/// The problems of a text to which the smallest valid file is added.
fn problems_of(text: &str) -> Vec<String> {
    problems(&format!("{text}\n{MINIMAL}"))
}

// --- errors of one value

#[test]
fn syntax_errors_have_their_place() {
    let errors = parse("[[pools]]\nworkers = [\"http://a:1\"\n[x]\n").unwrap_err();
    assert!(errors.problems[0].line >= 2, "{errors}");
    assert_eq!(problems("a = 1\nb = = 2\n")[0].split(' ').next(), Some("2:5:"));
    assert_eq!(problems("[retry]\nattempts = 1\nattempts = 2\n"), ["3:1: duplicate key"]);
}

#[test]
fn unknown_keys_have_a_suggestion() {
    assert_eq!(
        problems_of("[admision]\nmax_queue = 1\n[retry]\natempts = 1\nzzz = 2"),
        [
            "1:2: admision: unknown key, did you mean `admission`?",
            "4:1: retry.atempts: unknown key, did you mean `attempts`?",
            "5:1: retry.zzz: unknown key",
        ]
    );
    assert_eq!(
        problems_of("upstream_idle_ms = 1"),
        ["1:1: upstream_idle_ms: unknown key, did you mean `timeouts.upstream_idle_ms`?"]
    );
    assert_eq!(
        problems("workers = [\"http://a:1\"]"),
        [
            "1:1: pools: missing; at least one pool is needed: [[pools]] with workers = [\"http://HOST:PORT\"]",
            "1:1: workers: unknown key, did you mean `pools.workers`?",
        ]
    );
    assert_eq!(
        problems("[[pools]]\nworkers = [{ url = \"http://a:1\", lables = { a = \"b\" } }]"),
        ["2:34: pools[0].workers[0].lables: unknown key, did you mean `labels`?"]
    );
}

#[test]
fn wrong_types_name_both() {
    assert_eq!(
        problems_of("threads = \"four\"\nlisteners = 8080\nadmission.max_queue = 1.5\nrouting.bytes_per_token = true"),
        [
            "1:11: threads: expected an integer, found a string",
            "2:13: listeners: expected a list, found an integer",
            "3:23: admission.max_queue: expected an integer, found a number",
            "4:27: routing.bytes_per_token: expected a number, found a boolean",
        ]
    );
    assert_eq!(
        problems("[[pools]]\nworkers = [5]\napi_key = 7\nmodels = [1979-05-27]\n"),
        [
            "2:12: pools[0].workers[0]: expected a string or a table, found an integer",
            "3:11: pools[0].api_key: expected a string or a table, found an integer",
            "4:11: pools[0].models[0]: expected a string, found a date or time",
        ]
    );
    assert_eq!(problems("[pools]\nworkers = []\n"), ["1:1: pools: expected a list, found a table"]);
}

#[test]
fn numbers_out_of_range_name_the_range() {
    assert_eq!(
        problems_of(
            "threads = 0\nretry.attempts = -1\nadmission.kv_high_watermark = 1.01\nlimits.body_bytes = \"8GiB\"\n\
             limits.header_bytes = 5\nadmission.overload_status = 500\nprefill.engine_priority = 9_999_999_999\n\
             timeouts.total_s = 99999999999999999999\nrouting.bytes_per_token = nan"
        ),
        [
            "8:20: timeouts.total_s: the integer does not fit into 64 bits",
            "9:27: routing.bytes_per_token: expected a finite number",
        ]
    );
    assert_eq!(
        problems_of(
            "threads = 0\nretry.attempts = -1\nadmission.kv_high_watermark = 1.01\nlimits.body_bytes = \"8GiB\"\n\
             limits.header_bytes = 5\nadmission.overload_status = 500\nprefill.engine_priority = 9_999_999_999"
        ),
        [
            "1:11: threads: must be from 1 to 1024",
            "2:18: retry.attempts: must be from 1 to 100",
            "3:31: admission.kv_high_watermark: must be from 0.05 to 1.0",
            "4:21: limits.body_bytes: must be from 1KiB to 4GiB",
            "5:23: limits.header_bytes: must be from 1KiB to 512KiB",
            "6:29: admission.overload_status: expected 503 or 429",
            "7:27: prefill.engine_priority: must be from -2147483648 to 2147483647",
        ]
    );
}

#[test]
fn words_that_are_not_in_the_list_have_a_suggestion() {
    assert_eq!(
        problems_of(
            "sessions.busy = \"wiat\"\nlogging.level = \"verbose\"\nlimits.body_bytes = \"64 megs\"\nprefill.engine_priority = \"low\""
        ),
        [
            "1:17: sessions.busy: expected \"wait\" or \"refuse\", did you mean `wait`?",
            "2:17: logging.level: expected \"error\" or \"warn\" or \"info\" or \"debug\" or \"trace\"",
            "3:21: limits.body_bytes: expected a size such as 1048576, \"512KiB\" or \"64MiB\"",
            "4:27: prefill.engine_priority: expected an integer or \"none\"",
        ]
    );
}

#[test]
fn addresses_and_headers_have_a_form() {
    assert_eq!(
        problems_of(
            "listeners = [{ address = \"8080\" }]\nadmin.address = \"of\"\nsessions.id_headers = [\"x y\", { session = \"\" }, {}]"
        ),
        [
            "1:26: listeners[0].address: expected an IP address and a port, such as 0.0.0.0:8080",
            "2:17: admin.address: expected an IP address and a port, such as 127.0.0.1:9180, or `off`",
            "3:24: sessions.id_headers[0]: expected a header name of letters, digits and - _ . only, at most 128 long",
            "3:43: sessions.id_headers[1].session: expected a header name of letters, digits and - _ . only, at most 128 long",
            "3:49: sessions.id_headers[2].session: missing; it has no default",
        ]
    );
}

#[test]
fn worker_urls_have_a_form() {
    let text = r#"[[pools]]
workers = [
  "ftp://a:1",
  "http://user:pw@a:1",
  "http://a:1/v1",
  "a:1",
  "http://",
  { url = "http://a:99999" },
  { id = "x" },
  { url = "http://a:1", id = "a,b" },
  "http://a,b:1",
  "http://{a}:1",
]
"#;
    assert_eq!(
        problems(text),
        [
            "3:3: pools[0].workers[0]: the scheme must be http or https",
            "4:3: pools[0].workers[1]: credentials do not belong in a URL; use api_key",
            "5:3: pools[0].workers[2]: expected scheme, host and port only, without a path, query or fragment",
            "6:3: pools[0].workers[3]: the scheme must be http or https",
            "7:3: pools[0].workers[4]: not a URL (empty host); expected one such as http://10.0.0.1:30000",
            "8:11: pools[0].workers[5].url: not a URL (invalid port number); expected one such as http://10.0.0.1:30000",
            "9:3: pools[0].workers[6].url: missing; it has no default",
            "10:30: pools[0].workers[7].id: expected letters, digits and - _ . : / [ ] @ only, 1 to 128 of them",
            "11:3: pools[0].workers[8]: the host must be an IP address or a name of letters, digits and - _ . only, at most 120 \
             of them",
            "12:3: pools[0].workers[9]: the host must be an IP address or a name of letters, digits and - _ . only, at most 120 \
             of them",
        ]
    );
}

#[test]
fn a_pool_needs_workers() {
    assert_eq!(problems("[[pools]]\nname = \"a\"\n"), ["1:1: pools[0].workers: missing; it has no default"]);
    assert_eq!(problems("[[pools]]\nworkers = []\n"), ["2:11: pools[0].workers: must not be empty"]);
    assert_eq!(problems("pools = []\n"), ["1:9: pools: must not be empty"]);
}

// --- errors between values

#[test]
fn names_ids_addresses_and_models_are_unique() {
    let text = r#"
[[pools]]
name = "p"
models = ["m", "m"]
workers = ["http://a:1", { url = "http://b:1", id = "a:1" }]
[[pools]]
name = "p"
models = ["m"]
workers = ["http://a:1", { url = "https://c:1", id = "c" }, { url = "http://d:1", id = "c" }]
"#;
    assert_eq!(
        problems(text),
        [
            "4:16: pools[0].models[1]: the model m is already used by pools[0].models[0]",
            "5:53: pools[0].workers[1].id: the worker id a:1 is already used by pools[0].workers[0]",
            "7:8: pools[1].name: the name p is already used by pools[0].name",
            "8:11: pools[1].models[0]: the model m is already used by pools[0].models[0]",
            "9:12: pools[1].workers[0]: the worker's address a:1 is already used by pools[0].workers[0]",
            "9:88: pools[1].workers[2].id: the worker id c is already used by pools[1].workers[1].id",
        ]
    );
}

#[test]
fn one_pool_takes_any_model() {
    assert_eq!(
        problems("[[pools]]\nworkers = [\"http://a:1\"]\n[[pools]]\nworkers = [\"http://b:1\"]\n"),
        ["3:1: pools[1].models: pools[0] takes any model already; name the models of all pools but one"]
    );
}

#[test]
fn an_admin_address_that_others_reach_needs_a_token() {
    assert_eq!(
        problems_of("[admin]\naddress = \"0.0.0.0:9180\""),
        ["2:11: admin.address: an administrative listener that other machines reach needs admin.token"]
    );
    assert!(parse(&format!("admin.address = \"[::1]:9180\"\n{MINIMAL}")).is_ok());
    let text = format!("admin.address = \"0.0.0.0:9180\"\nadmin.token = \"t\"\n{MINIMAL}");
    assert!(parse(&text).is_ok());
}

#[test]
fn listeners_do_not_collide() {
    assert_eq!(
        problems_of("listeners = [{}, { address = \"127.0.0.1:8080\" }, { address = \"127.0.0.1:9180\" }]"),
        [
            "1:30: listeners[1].address: the address is already taken by listeners[0].address",
            "1:1: admin.address: the address is already taken by listeners[2].address",
        ]
        .into_iter()
        .rev()
        .collect::<Vec<_>>()
    );
    let free = format!("listeners = [{{ address = \"127.0.0.1:0\" }}, {{ address = \"127.0.0.1:0\" }}]\n{MINIMAL}");
    assert!(parse(&free).is_ok(), "port 0 is any free one");
}

#[test]
fn plugins_are_checked_against_their_phase_and_files() {
    let text = r#"
[[plugins]]
name = "a"
wasm = "builtin:kv-afinity"
phase = "route"
[[plugins]]
name = "b"
wasm = "missing.wasm"
phase = "filter"
on_error = "fallback"
[[plugins]]
name = "b"
wasm = "builtin:priority-queue"
phase = "route"
[[plugins]]
name = "c d"
wasm = "."
phase = "rout"
[[plugins]]
name = "e"
wasm = "."
phase = "route"
memory_mib = 5000
"#;
    let missing = std::fs::metadata("missing.wasm").unwrap_err();
    assert_eq!(
        problems_of(text),
        [
            "4:8: plugins[0].wasm: no built-in policy is called `kv-afinity`; there are priority-queue, session-binding \
             and kv-affinity, did you mean `builtin:kv-affinity`?"
                .to_owned(),
            format!("8:8: plugins[1].wasm: cannot read ./missing.wasm: {missing}"),
            "10:12: plugins[1].on_error: the phase \"filter\" has no native default to fall back on; expected \
             \"closed\" or \"open\""
                .to_owned(),
            "12:8: plugins[2].name: the name b is already used by plugins[1].name".to_owned(),
            "14:9: plugins[2].phase: priority-queue runs in the phase \"admit\"".to_owned(),
            "16:8: plugins[3].name: expected letters, digits and - _ . only, 1 to 128 of them".to_owned(),
            "18:9: plugins[3].phase: expected \"filter\" or \"admit\" or \"route\" or \"background\", did you mean `route`?".to_owned(),
            "21:8: plugins[4].wasm: ./. is not a file".to_owned(),
            "23:14: plugins[4].memory_mib: must be from 1 to 4096".to_owned(),
        ]
    );
}

#[test]
fn plugins_on_trial_are_checked_against_the_others() {
    let plugin = |name: &str, phase: &str, keys: &str| {
        let policy = if phase == "admit" { "priority-queue" } else { "kv-affinity" };
        format!("[[plugins]]\nname = \"{name}\"\nwasm = \"builtin:{policy}\"\nphase = \"{phase}\"\n{keys}\n")
    };
    let canary = |of: &str| format!("canary = {{ of = \"{of}\", percent = 5 }}");
    let problem = |keys: &str| {
        let known =
            [plugin("queue", "admit", ""), plugin("stable", "route", ""), plugin("idea", "route", "shadow = true")];
        let found = problems_of(&(known.concat() + &plugin("next", "route", keys)));
        found.first().map(|text| text.split_once(": ").unwrap().1.to_owned()).unwrap_or_default()
    };
    assert_eq!(problem(&canary("stabel")), "plugins[3].canary.of: there is no plugin stabel");
    assert_eq!(problem(&canary("queue")), "plugins[3].canary.of: queue runs in the phase \"admit\", not \"route\"");
    for itself in ["idea", "next"] {
        let text = format!("plugins[3].canary.of: {itself} is a canary or a shadow itself");
        assert_eq!(problem(&canary(itself)), text);
    }
    assert_eq!(
        problem(&format!("shadow = true\n{}", canary("stable"))),
        "plugins[3].shadow: a canary decides, a shadow does not: expected one of the two"
    );
    assert_eq!(
        problem(&(canary("stable") + "\n" + &plugin("again", "route", &canary("stable")))),
        "plugins[4].canary.of: stable has a canary already"
    );
    assert_eq!(
        problem("canary = { of = \"stable\", percent = 0 }"),
        "plugins[3].canary.percent: must be from 1 to 100"
    );
    assert_eq!(problem("canary = { of = \"stable\" }"), "plugins[3].canary.percent: missing; it has no default");
    let filter = |keys: &str| {
        problems_of(&format!("[[plugins]]\nname = \"f\"\nwasm = \"Cargo.toml\"\nphase = \"filter\"\n{keys}\n")).concat()
    };
    assert!(filter("shadow = true").contains("plugins[0].shadow: a filter has no decision"));
    assert!(filter(&canary("f")).contains("plugins[0].canary: the session of a request is not known to filters"));
}

#[test]
fn modules_are_pinned_and_tested_as_far_as_the_file_can_tell() {
    let problem = |wasm: &str, keys: &str| {
        problems_of(&format!("[[plugins]]\nname = \"a\"\nwasm = \"{wasm}\"\nphase = \"route\"\n{keys}")).concat()
    };
    let (url, hash) = ("https://example.com/a.wasm", "0123456789abcdefABCDEF".repeat(3));
    let pin = format!("sha256 = \"{}\"\n", &hash[..64]);
    let config = parse(&format!("[[plugins]]\nname = \"a\"\nwasm = \"{url}\"\nphase = \"route\"\n{pin}\n{MINIMAL}"));
    assert_eq!(config.unwrap().plugins[0].sha256, Some(hash[..64].to_lowercase()));
    assert!(problem(url, "").contains("plugins[0].wasm: a module from a URL needs the sha256"));
    assert!(problem(url, "sha256 = \"abc\"").ends_with("plugins[0].sha256: expected a SHA-256: 64 hexadecimal digits"));
    assert!(problem("HTTP://user:secret@host/a", &pin).contains("credentials do not belong in a URL"));
    assert!(!problem("HTTP://user:secret@host/a", &pin).contains("secret"));
    assert!(problem("https://", &pin).contains("plugins[0].wasm: not a URL (empty host)"));
    assert!(problem("https://host/a#b", &pin).contains("fragment"));
    let local = "builtin:kv-affinity";
    assert!(problem(local, "self_test = \"none.json\"").contains("plugins[0].self_test: cannot read ./none.json"));
    let soft = problem(local, "memory_mib = 64\nrecycle_memory_mib = 64");
    assert!(soft.ends_with("plugins[0].recycle_memory_mib: must be below memory_mib, 64"), "{soft}");
}

#[test]
fn timeouts_of_sessions_agree() {
    assert_eq!(
        problems_of("[sessions]\nmax_timeout_s = 60"),
        ["2:17: sessions.max_timeout_s: default_timeout_s is 300, longer than max_timeout_s, 60"]
    );
    assert_eq!(
        problems_of("[sessions]\nid_headers = [\"x-a\", { session = \"X-A\" }]"),
        ["2:34: sessions.id_headers[1].session: the header x-a is already used by sessions.id_headers[0]"]
    );
}

#[test]
fn the_access_log_needs_its_directory() {
    let dir = tempfile::tempdir().unwrap();
    let text = format!("logging.access = \"no/such.log\"\n{MINIMAL}");
    let errors = Config::parse(&text, "t.toml", dir.path()).unwrap_err();
    let path = dir.path().join("no/such.log");
    assert_eq!(
        errors.problems[0].to_string(),
        format!("1:18: logging.access: the directory of {} does not exist", path.display())
    );
    assert!(Config::parse(&text.replace("no/", ""), "t.toml", dir.path()).is_ok());
}

#[test]
fn the_recording_needs_its_directory_and_a_file_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let problem = |logging: &str| {
        let text = format!("[logging]\n{logging}\n{MINIMAL}");
        Config::parse(&text, "t.toml", dir.path()).map_err(|errors| errors.problems[0].to_string())
    };
    let path = dir.path().join("no/t.jsonl");
    assert_eq!(
        problem("record = \"no/t.jsonl\"").unwrap_err(),
        format!("2:10: logging.record: the directory of {} does not exist", path.display())
    );
    assert_eq!(
        problem("access = \"t.jsonl\"\nrecord = \"t.jsonl\"").unwrap_err(),
        "3:10: logging.record: is the file of the access log"
    );
    let config = problem("record = \"t.jsonl\"").unwrap();
    assert_eq!(config.logging.record.as_deref(), Some(dir.path().join("t.jsonl").as_path()));
    assert!(config.summary().contains("t.jsonl, 4 files of 256MiB"), "{}", config.summary());
    assert!(problem("record = \"t.jsonl\"\nrecord_bytes = 1").is_err());
    assert!(problem("record = \"t.jsonl\"\nrecord_files = 0").is_err());
}

#[test]
fn snapshots_need_a_directory() {
    assert_eq!(
        problems_of("[state]\ninterval_s = 30"),
        ["2:14: state.interval_s: snapshots need a directory of their own: state.dir"]
    );
    assert!(parse(&format!("[state]\ninterval_s = 30\ndir = \"d\"\n{MINIMAL}")).is_ok());
    assert_eq!(problems_of("[state]\nsnapshot_bytes = 1").len(), 1);
}

#[test]
fn every_problem_is_reported_at_once() {
    let text = "thread = 1\n[retry]\nattempts = 0\n[[pools]]\nworkers = [\"http://a:1\", \"http://a:1\", \"x\"]\n";
    let errors = parse(text).unwrap_err();
    assert_eq!(
        errors.to_string(),
        "t.toml:1:1: thread: unknown key, did you mean `threads`?\n\
         t.toml:3:12: retry.attempts: must be from 1 to 100\n\
         t.toml:5:26: pools[0].workers[1]: the worker's address a:1 is already used by pools[0].workers[0]\n\
         t.toml:5:40: pools[0].workers[2]: not a URL (relative URL without a base); expected one such as \
         http://10.0.0.1:30000"
    );
}

#[test]
fn columns_count_characters_and_keys_are_quoted() {
    assert_eq!(
        problems_of("[[plugins]]\nname = \"é\" # ü\n\"ö x\" = 1\nwasm = \"builtin:kv-affinity\"\nphase = \"route\""),
        [
            "2:8: plugins[0].name: expected letters, digits and - _ . only, 1 to 128 of them",
            "3:1: plugins[0].\"ö x\": unknown key",
        ]
    );
    assert_eq!(problems_of("retry = { \"é\" = 1, attempts = 0 }")[1], "1:31: retry.attempts: must be from 1 to 100");
}

#[test]
fn times_of_ejections_agree() {
    assert_eq!(
        problems_of("[ejection]\nmax_ms = 1000"),
        ["2:10: ejection.max_ms: base_ms is 10000, longer than max_ms, 1000"]
    );
    assert_eq!(
        problems_of("[ejection]\nmax_share = 1.5\nconsecutive_faults = 1001"),
        [
            "2:13: ejection.max_share: must be from 0.0 to 1.0",
            "3:22: ejection.consecutive_faults: must be from 0 to 1000",
        ]
    );
}

#[test]
fn plugins_call_upstreams_and_pools_that_exist() {
    let plugin = "[[plugins]]\nname = \"p\"\nwasm = \"builtin:kv-affinity\"\nphase = \"route\"\n";
    let upstream = "[[upstreams]]\nname = \"auth\"\nurl = \"http://10.0.0.9:80\"\n";
    let text = format!("{plugin}upstreams = [\"auth\", \"default\"]\n{upstream}{MINIMAL}");
    assert_eq!(parse(&text).unwrap().plugins[0].upstreams, ["auth", "default"]);
    assert_eq!(
        problems_of(&format!(
            "{plugin}upstreams = [\"aut\", \"auth\", \"auth\"]\nsecret_headers = [\"cookies\"]\n{upstream}"
        )),
        [
            "5:14: plugins[0].upstreams[0]: no upstream or pool is called aut, did you mean `auth`?",
            "5:29: plugins[0].upstreams[2]: the name auth is already used by plugins[0].upstreams[1]",
            "6:19: plugins[0].secret_headers[0]: expected \"authorization\" or \"proxy-authorization\" or \"x-api-key\" or \
             \"cookie\" or \"set-cookie\", did you mean `cookie`?",
        ]
    );
}

#[test]
fn a_plugin_of_the_background_has_nothing_that_is_about_requests() {
    let plugin = "[[plugins]]\nname = \"p\"\nwasm = \"https://example.com/p.wasm\"\n";
    let plugin = format!("{plugin}sha256 = \"{}\"\nphase = \"background\"\n", "0".repeat(64));
    let config = parse(&format!("{plugin}{MINIMAL}")).unwrap();
    assert_eq!((config.plugins[0].phase, config.plugins[0].on_error()), (Phase::Background, OnError::Open));
    let nothing = "a plugin of the phase \"background\" sees no requests, so this means nothing";
    assert_eq!(
        problems_of(&format!(
            "{plugin}on_error = \"closed\"\nevents = [\"end\"]\nisolation = \"stream\"\nshadow = true\n\
             canary = {{ of = \"q\", percent = 5 }}\n"
        )),
        [
            format!("6:12: plugins[0].on_error: {nothing}"),
            format!("7:10: plugins[0].events: {nothing}"),
            format!("8:13: plugins[0].isolation: {nothing}"),
            format!("9:10: plugins[0].shadow: {nothing}"),
            format!("10:10: plugins[0].canary: {nothing}"),
        ]
    );
}

#[test]
fn only_filters_can_let_answers_go_past_them() {
    let module = format!("wasm = \"https://example.com/p.wasm\"\nsha256 = \"{}\"", "0".repeat(64));
    let plugin = |phase| format!("[[plugins]]\nname = \"p\"\n{module}\nphase = \"{phase}\"\n");
    let config = parse(&format!("{}response = false\n{MINIMAL}", plugin("filter"))).unwrap();
    assert!(!config.plugins[0].response);
    assert!(parse(&format!("{}{MINIMAL}", plugin("filter"))).unwrap().plugins[0].response);
    for phase in ["admit", "route"] {
        let problems = problems_of(&format!("{}response = false\n", plugin(phase)));
        assert_eq!(problems, ["6:12: plugins[0].response: only filters are shown answers, so this means nothing"]);
    }
}

#[test]
fn virtual_machines_have_a_name_space_a_configuration_and_an_environment_within_bounds() {
    let plugin = "[[plugins]]\nname = \"p\"\nwasm = \"builtin:kv-affinity\"\nphase = \"route\"\n";
    let text = format!(
        "{plugin}vm_id = \"shared\"\nvm_configuration = \"x\"\nenvironment = {{ A = \"1\", \"b c\" = \"\" }}\n{MINIMAL}"
    );
    let config = parse(&text).unwrap();
    let found = &config.plugins[0];
    assert_eq!((found.vm_id.as_deref(), &*found.vm_configuration.text()), (Some("shared"), "x"));
    assert_eq!(found.environment.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>(), ["A=1", "b c="]);
    let long = "v".repeat(4_097);
    let name = "n".repeat(129);
    let bad_name = "expected a name of 1 to 128 bytes without `=` and NUL";
    let bad_value = "expected a value of at most 4096 bytes without NUL";
    let problems = problems_of(&format!(
        "{plugin}vm_id = \"turnstile\"\n[plugins.environment]\n\"\" = \"1\"\n\"A=B\" = \"1\"\n\"C\\u0000\" = \"1\"\n{name} = \"1\"\n\
         D = \"a\\u0000\"\nE = \"{long}\"\n"
    ));
    assert_eq!(problems.len(), 7, "{problems:#?}");
    assert!(problems[0].contains("plugins[0].vm_id: turnstile is the name space of"), "{}", problems[0]);
    assert_eq!(problems.iter().filter(|problem| problem.ends_with(bad_name)).count(), 4, "{problems:#?}");
    assert_eq!(problems.iter().filter(|problem| problem.ends_with(bad_value)).count(), 2, "{problems:#?}");
    // The name is the name space of a plugin that has no vm_id.
    let named = plugin.replace("\"p\"", "\"turnstile\"");
    let problems = problems_of(&named);
    assert!(
        matches!(problems.as_slice(), [one] if one.contains("plugins[0].name: turnstile is the name space of")),
        "{problems:?}"
    );
    assert!(parse(&format!("{named}vm_id = \"own\"\n{MINIMAL}")).is_ok());
    let problems = problems_of(&format!("{plugin}vm_id = \"a/b\"\n"));
    assert_eq!(problems, ["5:9: plugins[0].vm_id: expected letters, digits and - _ . only, 1 to 128 of them"]);
    let many: String = (0..65).map(|n| format!("V{n} = \"\"\n")).collect();
    let problems = problems_of(&format!("{plugin}[plugins.environment]\n{many}"));
    assert!(
        matches!(problems.as_slice(), [one] if one.contains("plugins[0].environment") && one.contains("64")),
        "{problems:?}"
    );
    let problems = problems_of(&format!("{plugin}vm_configuration = \"{}\"\n", "x".repeat(65_537)));
    assert!(matches!(problems.as_slice(), [one] if one.contains("plugins[0].vm_configuration")), "{problems:?}");
    let problems = problems_of(&format!("{plugin}vm_configuration = [\"{}\"]\n", "x".repeat(65_533)));
    assert_eq!(problems, ["5:20: plugins[0].vm_configuration: must have at most 65536 characters as JSON"]);
    let most = "\u{e9}".repeat(65_532);
    assert!(parse(&format!("{plugin}vm_configuration = [\"{most}\"]\n{MINIMAL}")).is_ok());
}

#[test]
fn what_a_module_is_started_with_has_its_forms_and_bounds() {
    let plugin = "[[plugins]]\nname = \"p\"\nwasm = \"builtin:kv-affinity\"\nphase = \"route\"\n";
    let given = |keys: &str| parse(&format!("{plugin}{keys}\n{MINIMAL}")).unwrap().plugins[0].given();
    let absent = given("");
    assert_eq!((&*absent.root_id, absent.stub_unknown_imports), ("p", false), "the name is the root id");
    assert_eq!(given("root_id = \"\"").root_id, "", "as in Envoy");
    let longest = "\u{e9}".repeat(256);
    assert_eq!(given(&format!("root_id = \"{longest}\"")).root_id, longest);
    assert!(given("stub_unknown_imports = true").stub_unknown_imports);
    for key in ["config = \"a\"", "vm_configuration = \"a\"", "root_id = \"a\"", "stub_unknown_imports = true"] {
        assert_ne!(given(key), absent, "{key}");
    }
    assert_eq!(
        problems_of(&format!(
            "{plugin}config = 7\nvm_configuration = true\nroot_id = \"{longest}x\"\nstub_unknown_imports = \"yes\"\n"
        )),
        [
            "5:10: plugins[0].config: expected a table or a list or a string, found an integer",
            "6:20: plugins[0].vm_configuration: expected a table or a list or a string, found a boolean",
            "7:11: plugins[0].root_id: must have at most 256 characters",
            "8:24: plugins[0].stub_unknown_imports: expected true or false, found a string",
        ]
    );
    assert_eq!(
        problems_of(&format!("{plugin}config = 2026-11-29\nroot_id = [\"a\"]\n")),
        [
            "5:10: plugins[0].config: expected a table or a list or a string, found a date or time",
            "6:11: plugins[0].root_id: expected a string, found a list",
        ]
    );
}

#[test]
fn plugins_ask_for_events_that_there_are() {
    let plugin = "[[plugins]]\nname = \"p\"\nwasm = \"builtin:kv-affinity\"\nphase = \"route\"\n";
    let names = PluginEvent::ALL.map(|event| format!("{:?}", event.as_str())).join(", ");
    let config = parse(&format!("{plugin}events = [{names}]\n{MINIMAL}")).unwrap();
    assert_eq!(config.plugins[0].events, PluginEvent::ALL);
    assert!(parse(&format!("{plugin}{MINIMAL}")).unwrap().plugins[0].events.is_empty());
    assert_eq!(
        problems_of(&format!("{plugin}events = [\"usage\", \"tool_calls\"]\n")),
        [
            "5:20: plugins[0].events[1]: expected \"first_token\" or \"tool_call\" or \"finish\" or \"usage\" or \"end\", did you \
          mean `tool_call`?"
        ]
    );
}

#[test]
fn upstreams_have_names_of_their_own() {
    assert_eq!(
        problems_of(
            "[[upstreams]]\nname = \"default\"\nurl = \"http://a:1\"\n[[upstreams]]\nname = \"b\"\nurl = \"https://b:1\"\nh2c = true\n\
             [[upstreams]]\nname = \"b\"\nurl = \"http://b:2\"\n[[upstreams]]\nname = \"c\"\nurl = \"http://b:2/x\"\n"
        ),
        [
            "2:8: upstreams[0].name: a pool is called default already",
            "7:7: upstreams[1].h2c: h2c is HTTP/2 without TLS, and the url is https",
            "9:8: upstreams[2].name: the name b is already used by upstreams[1].name",
            "13:7: upstreams[3].url: expected scheme, host and port only, without a path, query or fragment",
        ]
    );
}

#[test]
fn tls_options_have_to_make_sense() {
    let pool = |url: &str, keys: &str| problems(&format!("[[pools]]\nworkers = [\"{url}\"]\n{keys}\n"));
    let upstream = |keys: &str| problems_of(&format!("[[upstreams]]\nname = \"b\"\nurl = \"https://b:1\"\n{keys}\n"));
    let (file, missing) = ("\"Cargo.toml\"", "\"no/such.pem\"");
    for (found, expected) in [
        (
            pool("http://a:1", &format!("ca_file = {file}")),
            "3:11: pools[0].ca_file: is for TLS, and no url here is https",
        ),
        (pool("http://a:1", "server_name = \"a\""), "3:15: pools[0].server_name: is for TLS, and no url here is https"),
        (
            pool("https://a:1", &format!("client_cert = {file}")),
            "3:15: pools[0].client_cert: needs its private key: client_key",
        ),
        (
            upstream(&format!("client_key = {file}")),
            "4:14: upstreams[0].client_key: needs the certificate it belongs to: client_cert",
        ),
        (
            upstream(&format!("verify = false\nca_file = {file}")),
            "5:11: upstreams[0].ca_file: nothing is verified by it: verify is false",
        ),
    ] {
        assert_eq!(found, [expected]);
    }
    let found = pool("https://a:1", &format!("ca_file = {missing}"));
    assert!(found.len() == 1 && found[0].starts_with("3:11: pools[0].ca_file: cannot read "), "{found:?}");
}

#[test]
fn an_upstream_that_is_not_verified_is_warned_of() {
    let upstream = "[[upstreams]]\nname = \"b\"\nurl = \"https://b:1\"\n";
    let warnings = |keys: &str| parse(&format!("{MINIMAL}{upstream}{keys}\n")).unwrap().warnings();
    assert_eq!(warnings(""), Vec::<String>::new());
    let warned = warnings("verify = false");
    assert!(warned.len() == 1 && warned[0].contains("upstream b is NOT verified"), "{warned:?}");
}

#[test]
fn a_user_of_a_redis_server_has_a_password() {
    let redis = "[[upstreams]]\nname = \"r\"\nurl = \"redis://127.0.0.1:6379\"\nusername = \"limited\"\n";
    let problems = problems_of(redis);
    assert!(
        matches!(problems.as_slice(), [one] if one.contains("upstreams[0].username: username needs a password")),
        "{problems:?}"
    );
    assert!(parse(&format!("{redis}password = \"x\"\n{MINIMAL}")).is_ok());
}
