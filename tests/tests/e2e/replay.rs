//! Turns that are recorded, and played again.

use clap::Parser;
use serde_json::{Value, json};
use std::path::Path;
use turnstile::cli::{Cli, Command};
use turnstile::replay::replay;
use turnstile::replay::report::Report;
use turnstile_tests::harness::{CHAT, Request, Rig, Setup, WorkerExt, until};

const CREDENTIAL: &str = "sk-verysecretcredential";
/// Words that stand in prompts and headers of the clients, and nowhere else.
const WORDS: [&str; 6] =
    ["xylophone", "marzipan", "quicksilver", "zeppelin", "ultramarine", "header-value-of-a-client"];

fn setup() -> Setup {
    Setup::new()
        .sim(|c| {
            c.enable_session_radix_cache = true;
            c.enable_cache_report = true;
            c.max_total_tokens = 40_000;
            c.default_output_tokens = 40;
            c.speed = 20.0;
        })
        .workers(3)
        .set("logging.record", "\"turns.jsonl\"")
}

/// A text of some hundred words that only this agent has.
fn text(agent: &str, turn: usize, words: usize) -> String {
    (0..words).map(|n| format!("{} {agent} {turn} {n}", WORDS[n % 5])).collect::<Vec<_>>().join(", ")
}

/// One conversation: the whole history with every turn.
async fn converse(rig: &Rig, agent: &str, parent: Option<&str>, turns: usize) {
    let system = format!("You are an agent. {}", text("all", 0, 120));
    let mut messages = vec![json!({"role": "system", "content": system})];
    for turn in 0..turns {
        messages.push(json!({"role": "user", "content": text(agent, turn, 60 + 20 * turn)}));
        let control = match turn {
            0 => json!({"session_id": agent, "action": "bind"}),
            _ => json!({"session_id": agent}),
        };
        let body = json!({
            "model": "sim",
            "messages": messages,
            "nvext": {"session_control": control, "agent_hints": {"priority": turn, "osl": 40}},
        });
        let mut request = Request::json(CHAT, &body)
            .header("authorization", &format!("Bearer {CREDENTIAL}"))
            .header("x-of-the-client", WORDS[5]);
        if let Some(parent) = parent {
            request = request.header("x-dynamo-parent-session-id", parent).header("x-dynamo-session-id", agent);
        }
        let answer = rig.send(&request).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        messages.push(answer.json()["choices"][0]["message"].clone());
    }
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn turns(path: &Path) -> Vec<Value> {
    lines(path).into_iter().filter(|line| line["kind"] == "turn").collect()
}

async fn until_recorded(path: &Path, count: usize) {
    until(&format!("{count} turns recorded"), async || turns(path).len() >= count).await;
}

fn replayed(log: &Path, more: &[&str]) -> Report {
    let all = ["turnstile", "replay", log.to_str().unwrap()].into_iter().chain(more.iter().copied());
    match Cli::try_parse_from(all).unwrap().command {
        Command::Replay(args) => replay(&args).unwrap_or_else(|error| panic!("{error}")).report,
        _ => unreachable!("another command"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_recorded_is_played_again_with_the_same_hits() {
    let rig = setup().start().await;
    let one = |agent: &'static str| converse(&rig, agent, None, 5);
    tokio::join!(one("a"), one("b"), one("c"), one("d"), one("e"));
    // Sub-agents of the first.
    tokio::join!(converse(&rig, "a-1", Some("a"), 3), converse(&rig, "a-2", Some("a"), 3));
    let path = rig.dir().join("turns.jsonl");
    until_recorded(&path, 31).await;

    let recorded = turns(&path);
    let sum = |member: &str| recorded.iter().map(|line| line[member].as_u64().unwrap()).sum::<u64>();
    let hit_ratio = sum("cached_tokens") as f64 / sum("prompt_tokens") as f64;
    assert!(hit_ratio > 0.4, "{hit_ratio}");
    let report = replayed(&path, &["-p", "builtin", "-p", "native", "--closed-loop", "--warmup", "0%"]);
    let [builtin, native] = &report.policies[..] else { unreachable!("two policies") };
    assert_eq!((builtin.served, builtin.refused.len()), (31, 0));
    println!("hit ratio {hit_ratio} when recorded, {} when replayed", builtin.hit_ratio);
    // What stands behind the last whole block is known by the reported tokens only, which tell of one worker; and turns that
    // came together may have been placed in another order. Both together made up to 0.005 in a dozen runs.
    assert!((builtin.hit_ratio - hit_ratio).abs() < 0.02, "{} against {hit_ratio}", builtin.hit_ratio);
    assert_eq!((builtin.hit_ratio, builtin.moves), (native.hit_ratio, native.moves));
    assert_eq!(builtin.prompt_tokens, sum("prompt_tokens"), "every prompt is as long as its worker said");
    assert_eq!(builtin.completion_tokens, sum("completion_tokens"));
    assert_eq!(report.replay.workers.len(), 3);
    assert!(report.replay.workers.iter().all(|worker| worker.kv_tokens == 40_000 && worker.tag));
    // All turns but the first of the five agents follow another, those of the sub-agents their parent's.
    assert_eq!(report.replay.following_turns, 26);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_line_has_who_and_how_much_and_nothing_of_what() {
    let rig = setup().start().await;
    converse(&rig, "parent-name", None, 2).await;
    converse(&rig, "child-name", Some("parent-name"), 2).await;
    let path = rig.dir().join("turns.jsonl");
    until_recorded(&path, 4).await;
    let text = std::fs::read_to_string(&path).unwrap();
    let answers =
        rig.workers.iter().flat_map(|worker| worker.on(CHAT)).map(|request| request.json()["messages"].clone());
    let mut secrets: Vec<String> = WORDS.iter().map(|word| (*word).to_owned()).collect();
    secrets.extend(["parent-name", "child-name", CREDENTIAL, "verysecret", "Bearer", "You are"].map(str::to_owned));
    for messages in answers {
        for message in messages.as_array().unwrap() {
            // Words that no member or value of a line is made of.
            let words = message["content"].as_str().unwrap_or_default().split(|c: char| !c.is_ascii_alphabetic());
            secrets.extend(words.filter(|word| word.len() > 9).map(str::to_owned));
        }
    }
    for secret in secrets {
        assert!(!text.contains(&secret), "{secret:?} stands in the recording");
    }

    let turns = turns(&path);
    let session = |n: usize| turns[n]["session"].as_str().unwrap();
    assert_eq!(session(0), session(1));
    assert_ne!(session(0), session(2));
    assert_eq!((&turns[2]["parent"], &turns[2]["tree"]), (&json!(session(0)), &json!(session(0))));
    assert_eq!(turns[0]["tree"], Value::Null, "its own tree");
    assert_eq!((&turns[0]["action"], &turns[1]["action"]), (&json!("bind"), &Value::Null));
    assert_eq!((&turns[1]["priority"], &turns[1]["osl"], &turns[1]["turn"]), (&json!(1), &json!(40), &json!(2)));
    assert_eq!(
        (&turns[0]["status"], &turns[0]["end"], &turns[0]["route"]),
        (&json!(200), &json!("finished"), &json!("chat"))
    );
    assert!(turns[1]["cached_tokens"].as_u64().unwrap() > 0 && turns[1]["base_blocks"].as_u64().unwrap() > 0);
    assert!(turns[1]["blocks"].as_str().unwrap().len() < turns[0]["blocks"].as_str().unwrap().len());
    assert_eq!(turns[0]["model"], Value::Null, "no pool names it");
    let fleet = lines(&path).into_iter().find(|line| line["kind"] == "fleet").unwrap();
    assert_eq!(fleet["workers"].as_array().unwrap().len(), 3);
    assert_eq!(fleet["workers"][0]["kv_capacity_tokens"], 40_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_recorded_unless_asked_for() {
    let rig = Setup::new().workers(1).start().await;
    converse(&rig, "a", None, 1).await;
    assert!(rig.gateway().recording.is_none());
    let names: Vec<_> = std::fs::read_dir(rig.dir()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(!names.iter().any(|name| name.to_string_lossy().ends_with(".jsonl")), "{names:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_that_were_refused_are_recorded_and_left_out() {
    let rig = setup().start().await;
    converse(&rig, "a", None, 1).await;
    // The worker refuses it: longer than its context.
    let long = json!({"model": "sim", "messages": [{"role": "user", "content": "x y ".repeat(60_000)}]});
    assert_eq!(rig.post(CHAT, &long).await.status, 400);
    let path = rig.dir().join("turns.jsonl");
    until_recorded(&path, 2).await;
    let report = replayed(&path, &["-p", "native", "--warmup", "0%"]);
    assert_eq!(report.replay.turns, 1);
    assert_eq!(report.replay.reading.left_out["not answered by a worker"], 1);
}
