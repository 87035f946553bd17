#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "tests/forest.rs"]
mod forest;

use super::*;
use crate::cli::{Cli, Command};
use clap::Parser;
use forest::Forest;
use std::path::PathBuf;
use tempfile::TempDir;

/// A directory with a log in it.
struct Place {
    dir: TempDir,
}

impl Place {
    fn new(log: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("log.jsonl"), log).unwrap();
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn args(&self, more: &[&str]) -> ReplayArgs {
        let log = self.path("log.jsonl");
        let all = ["turnstile", "replay", log.to_str().unwrap()].into_iter().chain(more.iter().copied());
        match Cli::try_parse_from(all).unwrap().command {
            Command::Replay(args) => *args,
            _ => panic!("another command"),
        }
    }

    fn replay(&self, more: &[&str]) -> Report {
        replay(&self.args(more)).unwrap_or_else(|error| panic!("{error}")).report
    }

    fn error(&self, more: &[&str]) -> String {
        replay(&self.args(more)).err().unwrap()
    }
}

fn policy<'a>(report: &'a Report, name: &str) -> &'a Summary {
    report.policies.iter().find(|summary| summary.policy == name).unwrap()
}

const SMALL: [&str; 6] = ["--workers", "3", "--kv-tokens", "60000", "--max-running", "8"];

#[test]
fn affinity_beats_what_knows_nothing() {
    let place = Place::new(&Forest { agents: 24, turns: 6, seed: 3, ..Forest::default() }.log());
    let baselines = ["-p", "native", "-p", "round-robin", "-p", "random", "-p", "least-load"];
    let report = place.replay(&[&SMALL[..], &baselines].concat());
    let native = policy(&report, "native");
    for name in ["round-robin", "random", "least-load"] {
        let other = policy(&report, name);
        assert!(native.hit_ratio > other.hit_ratio + 0.1, "{name}: {} {}", native.hit_ratio, other.hit_ratio);
        assert!(native.prefilled_tokens < other.prefilled_tokens, "{name}");
        assert!(native.ttft_ms.mean < other.ttft_ms.mean, "{name}");
        assert!(other.sessions_moved > native.sessions_moved, "{name}");
    }
    assert!(native.hit_ratio <= native.ideal_hit_ratio);
    assert!(native.hit_ratio > 0.8 * native.ideal_hit_ratio, "{native:?}");
    for difference in &report.differences {
        assert!(difference.hit_ratio.is_clear() && difference.hit_ratio.high < 0.0, "{difference:?}");
        assert_eq!(difference.against, "native");
    }
    // Everybody served the same turns.
    for summary in &report.policies {
        assert_eq!((summary.served, &summary.refused), (native.served, &Default::default()));
        assert_eq!(summary.completion_tokens, native.completion_tokens);
        assert_eq!(summary.prompt_tokens, native.prompt_tokens);
    }
}

#[test]
fn the_built_in_plugins_decide_as_the_native_built_in_does() {
    let place = Place::new(&Forest { agents: 8, turns: 4, seed: 5, hints: true, ..Forest::default() }.log());
    let report = place.replay(&[&SMALL[..], &["-p", "builtin", "-p", "native"]].concat());
    let [builtin, native] = &report.policies[..] else { panic!("two policies") };
    assert_eq!(builtin, &Summary { policy: "builtin".into(), ..native.clone() });
    assert!(builtin.ttft_ms_by_urgency.len() > 1, "{:?}", builtin.ttft_ms_by_urgency);
}

#[test]
fn the_same_seed_gives_the_same_bytes() {
    let place = Place::new(&Forest { agents: 6, turns: 3, seed: 9, hints: true, ..Forest::default() }.log());
    let run_once = |name: &str, seed: &str| {
        let (html, svg) = (place.path(&format!("{name}.html")), place.path(&format!("{name}.svg")));
        let more = ["-p", "builtin", "-p", "random", "--resamples", "50", "--seed", seed, "--json"];
        let files = ["--html", html.to_str().unwrap(), "--svg", svg.to_str().unwrap()];
        let text = run(&place.args(&[&SMALL[..], &more, &files].concat())).unwrap();
        let read = |path: &Path| std::fs::read_to_string(path).unwrap();
        (text, read(&html), read(&svg))
    };
    let first = run_once("a", "1");
    assert_eq!(first, run_once("b", "1"));
    assert_ne!(first.0, run_once("c", "2").0, "the seed matters to what is random");
    let json: serde_json::Value = serde_json::from_str(&first.0).unwrap();
    assert_eq!(json["policies"].as_array().unwrap().len(), 2);
    let (html, svg) = (&first.1, &first.2);
    assert!(html.contains(svg.as_str()) && html.contains("<table>"));
    // Nothing of it is loaded from elsewhere, and the one address in it names a namespace.
    for page in [html, svg] {
        assert_eq!(page.matches("http").count(), 1, "{page}");
        assert!(!page.contains("<script") && !page.contains("url(") && !page.contains("@import"));
    }
}

#[test]
fn in_a_closed_loop_turns_come_after_those_before_them() {
    let forest = Forest { agents: 4, turns: 5, seed: 2, ..Forest::default() };
    let place = Place::new(&forest.log());
    // On workers a hundred times as slow as the recorded ones.
    let slow = ["--workers", "2", "--kv-tokens", "200000", "--prefill-rate", "100", "-p", "native", "--warmup", "0%"];
    let open = place.replay(&slow);
    let closed = place.replay(&[&slow[..], &["--closed-loop"]].concat());
    assert_eq!(open.replay.following_turns, 0);
    assert!(closed.replay.following_turns >= 4 * 4, "{}", closed.replay.following_turns);
    // With the clients waiting, the turns of a session do not pile up.
    assert!(closed.policies[0].ttft_ms.p99 < open.policies[0].ttft_ms.p99);
    assert_eq!(closed.policies[0].served, open.policies[0].served);
    let fast = place.replay(&["--closed-loop", "--speed", "10", "--warmup", "0%", "-p", "native"]);
    assert!(fast.policies[0].makespan_s < place.replay(&["--closed-loop", "-p", "native"]).policies[0].makespan_s);
}

#[test]
fn a_fleet_is_what_the_log_tells_unless_the_command_line_says_else() {
    let place = Place::new(&Forest { agents: 2, turns: 2, ..Forest::default() }.log());
    let told = &place.replay(&["-p", "native"]).replay.workers;
    assert_eq!(told.len(), 3);
    assert_eq!((told[0].id.as_str(), told[0].kv_tokens, told[0].max_running), ("w0", 80_000, 16));
    assert_eq!((told[1].prefill_tokens_per_s, told[1].tag, told[1].priority), (9_000.0, true, true));
    let said = &place.replay(&["-p", "native", "--workers", "5", "--prefill-rate", "1e4", "--decode-ms", "3"]);
    let said = &said.replay.workers;
    assert_eq!((said.len(), said[4].id.as_str(), said[4].kv_tokens), (5, "worker-4", 80_000));
    assert_eq!((said[0].prefill_tokens_per_s, said[0].decode_ms), (1e4, 3.0));
}

#[test]
fn a_fleet_from_a_file_is_the_recorded_one_but_for_what_the_file_says() {
    let place = Place::new(&Forest { agents: 2, turns: 2, ..Forest::default() }.log());
    let file = place.path("fleet.json");
    let fleet = r#"{"workers": [
        {"kv_tokens": 200000},
        {"count": 2, "id": "fast", "like": "w1", "prefill_tokens_per_s": 50000, "decode_ms": 2, "labels": {"gpu": "new"}},
        {"id": "plain", "max_running": 4, "max_in_flight": 6, "tag": false, "priority": false, "decode_ms_per_running": 1},
        {"like": "w2"}]}"#;
    std::fs::write(&file, fleet).unwrap();
    let on_file = ["-p", "native", "--fleet", file.to_str().unwrap()];
    let report = place.replay(&on_file);
    let workers = &report.replay.workers;
    let ids: Vec<&str> = workers.iter().map(|worker| worker.id.as_str()).collect();
    assert_eq!(ids, ["w0", "fast-0", "fast-1", "plain", "worker-4"]);
    let told = &place.replay(&["-p", "native"]).replay.workers;
    assert_eq!((workers[0].kv_tokens, workers[0].max_running), (200_000, told[0].max_running));
    assert_eq!((workers[1].prefill_tokens_per_s, workers[1].decode_ms), (50_000.0, 2.0));
    assert_eq!((workers[1].kv_tokens, workers[1].labels["gpu"].as_str()), (told[1].kv_tokens, "new"));
    let plain = &workers[3];
    assert_eq!((plain.max_running, plain.max_in_flight, plain.tag, plain.priority), (4, Some(6), false, false));
    assert!(plain.decode_ms_per_running > told[0].decode_ms_per_running && plain.decode_ms < told[0].decode_ms);
    assert_eq!(workers[4].prefill_tokens_per_s, told[2].prefill_tokens_per_s);
    assert!(report.text().contains("on 5 workers of fleet.json,"), "{}", report.text());

    // Options are for what the file leaves open; a fleet of a report is a file; and all of it is the same again.
    let faster = place.replay(&[&on_file[..], &["--prefill-rate", "1e4"]].concat()).replay.workers;
    assert_eq!((faster[0].prefill_tokens_per_s, faster[1].prefill_tokens_per_s), (1e4, 50_000.0));
    let json = run(&place.args(&[&on_file[..], &["--json"]].concat())).unwrap();
    assert_eq!(json, run(&place.args(&[&on_file[..], &["--json"]].concat())).unwrap());
    let report: serde_json::Value = serde_json::from_str(&json).unwrap();
    std::fs::write(&file, serde_json::json!({"workers": report["replay"]["workers"]}).to_string()).unwrap();
    assert_eq!(json, run(&place.args(&[&on_file[..], &["--json"]].concat())).unwrap());
}

#[test]
fn a_faster_and_larger_fleet_of_a_file_serves_sooner() {
    let place = Place::new(&Forest { agents: 12, turns: 4, seed: 4, ..Forest::default() }.log());
    let file = place.path("fleet.json");
    let on = |fleet: &str| {
        std::fs::write(&file, fleet).unwrap();
        let report = place.replay(&["-p", "native", "--warmup", "0%", "--fleet", file.to_str().unwrap()]);
        let summary = &report.policies[0];
        assert_eq!(summary.workers.len(), report.replay.workers.len());
        (summary.ttft_ms.mean, summary.workers.iter().map(|share| share.prefilled_tokens).collect::<Vec<_>>())
    };
    let (slow, _) = on(r#"{"workers": [{"prefill_tokens_per_s": 500}]}"#);
    let (fast, _) = on(r#"{"workers": [{"count": 6, "prefill_tokens_per_s": 20000}]}"#);
    assert!(fast < slow / 4.0, "{fast} {slow}");
    // Of two unequal ones the quicker does more.
    let (_, shares) = on(r#"{"workers": [{"prefill_tokens_per_s": 500}, {"prefill_tokens_per_s": 20000}]}"#);
    assert!(shares[1] > shares[0], "{shares:?}");
}

#[test]
fn what_is_wrong_in_the_file_of_a_fleet_is_named_by_its_place() {
    let place = Place::new(&Forest { agents: 2, turns: 2, ..Forest::default() }.log());
    let file = place.path("fleet.json");
    let name = file.to_str().unwrap();
    assert!(place.error(&["--fleet", name]).starts_with(&format!("--fleet: {name}: ")), "no such file");
    for (fleet, said) in [
        ("{}", "missing field `workers`"),
        (r#"{"workers": []}"#, "workers: there is none"),
        (r#"{"workers": [{"kv": 1}]}"#, "unknown field `kv`"),
        (r#"{"workers": [{}, {"kv_tokens": 999}]}"#, "workers[1].kv_tokens: must be 1000 to 1099511627776, found 999"),
        (r#"{"workers": [{"prefill_tokens_per_s": 0}]}"#, "workers[0].prefill_tokens_per_s: must be 1 to 1000000000"),
        (r#"{"workers": [{"decode_ms": -1}]}"#, "workers[0].decode_ms: must be 0.001 to 10000, found -1"),
        (r#"{"workers": [{"count": 0}]}"#, "workers[0].count: must be 1 to 1024, found 0"),
        (r#"{"workers": [{"count": 1000}, {"count": 25}]}"#, "workers[1].count: a replay has at most 1024 workers"),
        (r#"{"workers": [{"like": "w9"}]}"#, "workers[0].like: the log has no worker \"w9\""),
        (r#"{"workers": [{"id": "a"}, {"id": "a"}]}"#, "workers: there are two of the id \"a\""),
        (r#"{"workers": [{"id": ""}]}"#, "workers[0].id: is empty"),
    ] {
        std::fs::write(&file, fleet).unwrap();
        let error = place.error(&["--fleet", name]);
        assert!(error.starts_with(&format!("--fleet: {name}: ")) && error.contains(said), "{fleet}: {error}");
    }
    let both = ["turnstile", "replay", "log", "--fleet", name, "--workers", "2"];
    assert!(Cli::try_parse_from(both).is_err());
}

#[test]
fn a_chain_of_its_own_comes_from_a_file() {
    let place = Place::new(&Forest { agents: 6, turns: 4, ..Forest::default() }.log());
    std::fs::write(
        place.path("own.toml"),
        "[[plugins]]\nname = \"kv\"\nwasm = \"builtin:kv-affinity\"\nphase = \"route\"\nconfig = { margin_ms = 1 }\n",
    )
    .unwrap();
    let own = place.path("own.toml");
    let report = place.replay(&["-p", own.to_str().unwrap()]);
    assert_eq!(report.policies.len(), 1);
    assert!(report.policies[0].hit_ratio > 0.0);

    std::fs::write(place.path("bad.toml"), "[[plugins]]\nname = \"x\"\nwasm = \"no.wasm\"\nphase = \"route\"\n")
        .unwrap();
    let bad = place.path("bad.toml");
    assert!(place.error(&["-p", bad.to_str().unwrap()]).contains("no.wasm"));
    assert!(place.error(&["-p", "native", "-p", "native"]).contains("named twice"));
    assert!(place.error(&["-p", "nonsense"]).contains("nonsense"));
}

#[test]
fn a_pool_is_chosen_where_there_are_several() {
    let forest = Forest { agents: 2, turns: 2, ..Forest::default() };
    let other = Forest { pool: "other", seed: 77, ..forest.clone() };
    let place = Place::new(&(forest.log() + &other.log()));
    assert_eq!(place.error(&[]), "--pool: the log has turns of several: main, other");
    assert!(place.error(&["--pool", "none"]).contains("no turn of none"));
    let report = place.replay(&["-p", "native", "--pool", "other"]);
    assert_eq!(report.replay.pool, "other");
    assert_eq!(report.replay.reading.left_out["of another pool"], report.replay.turns);
}

#[test]
fn what_cannot_be_counted_is_refused() {
    let place = Place::new(&Forest { agents: 2, turns: 2, ..Forest::default() }.log());
    assert!(place.error(&["-p", "native", "--warmup", "99999s"]).contains("no turn is left"));
    let empty = Place::new("");
    assert!(empty.error(&[]).contains("no turn to replay in 0 lines"));
}

#[test]
fn a_full_queue_and_long_prompts_are_counted_and_end_the_wait() {
    let place = Place::new(&Forest { agents: 12, turns: 3, gap_ms: 50, ..Forest::default() }.log());
    std::fs::write(place.path("c.toml"), "[admission]\nmax_queue = 2\nmax_wait_ms = 2000\n").unwrap();
    let config = place.path("c.toml");
    let tight = ["--workers", "1", "--max-in-flight", "1", "--prefill-rate", "2000", "--warmup", "0%", "-p", "native"];
    let report = place.replay(&[&tight[..], &["--config", config.to_str().unwrap()]].concat());
    let refused = &report.policies[0].refused;
    assert!(refused.contains_key("the queue was full"), "{refused:?}");
    assert!(refused.contains_key("waited too long"), "{refused:?}");
    let all: u64 = refused.values().sum::<u64>() + report.policies[0].served;
    assert_eq!(all, report.replay.turns);
    let short = place.replay(&["--kv-tokens", "2000", "-p", "native", "--warmup", "0%"]);
    assert!(short.policies[0].refused.contains_key("longer than the KV pool of a worker"));
}

#[test]
fn a_golden_log_gives_a_golden_table() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/replay/golden");
    let run_on = |log: &str, more: &[&str]| {
        let log = here.join(log);
        let all = ["turnstile", "replay", log.to_str().unwrap()].into_iter().chain(more.iter().copied());
        match Cli::try_parse_from(all).unwrap().command {
            Command::Replay(args) => run(&args).unwrap(),
            _ => panic!("another command"),
        }
    };
    let cases: [(&str, &str, &[&str]); 2] = [
        ("turns.jsonl", "turns.txt", &["-p", "builtin", "-p", "round-robin", "--resamples", "200"]),
        ("trace.jsonl", "trace.txt", &["-p", "native", "-p", "random", "--workers", "2", "--kv-tokens", "20000"]),
    ];
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        let forest = Forest { agents: 5, turns: 4, seed: 11, hints: true, ..Forest::default() };
        std::fs::write(here.join("turns.jsonl"), forest.log()).unwrap();
    }
    for (log, golden, more) in cases {
        let text = run_on(log, more);
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(here.join(golden), &text).unwrap();
        }
        assert_eq!(text, std::fs::read_to_string(here.join(golden)).unwrap(), "{golden}");
    }
}

#[test]
fn policies_are_told_of_events() {
    // Refuses every turn once it has been told of a fourth event.
    let guest = r#"(module
        (import "env" "proxy_send_local_response" (func $respond (param i32 i32 i32 i32 i32 i32 i32 i32) (result i32)))
        (memory (export "memory") 1)
        (global $told (mut i32) (i32.const 0))
        (func (export "proxy_abi_version_0_2_1"))
        (func (export "malloc") (param i32) (result i32) (i32.const 4096))
        (func (export "proxy_on_foreign_function") (param i32 i32 i32)
          (global.set $told (i32.add (global.get $told) (i32.const 1))))
        (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
          (if (i32.ge_u (global.get $told) (i32.const 4)) (then
            (drop (call $respond (i32.const 429) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0)
              (i32.const 0) (i32.const -1)))))
          (i32.const 0)))"#;
    let place = Place::new(&Forest { agents: 4, turns: 6, seed: 3, ..Forest::default() }.log());
    std::fs::write(place.path("told.wasm"), wat::parse_str(guest).unwrap()).unwrap();
    let refused = |events: &str| {
        let text = format!("[[plugins]]\nname = \"told\"\nwasm = \"told.wasm\"\nphase = \"admit\"\n{events}\n");
        std::fs::write(place.path("told.toml"), text).unwrap();
        let config = place.path("told.toml");
        let report = place.replay(&[&SMALL[..], &["-p", config.to_str().unwrap()]].concat());
        report.policies.first().unwrap().refused.values().sum::<u64>()
    };
    assert_eq!(refused(""), 0);
    let ends = refused("events = [\"end\"]");
    let all = refused("events = [\"first_token\", \"finish\", \"usage\", \"end\"]");
    assert!(ends > 0 && all > ends, "{ends} {all}");
}
