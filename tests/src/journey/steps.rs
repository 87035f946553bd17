//! The steps, in the order of docs/writing-policies.md.

use super::account::Account;
use super::agents::Traffic;
use super::configuration::Station;
use super::language::{ALTERED_CASES, REASON};
use super::project::{NAME, Project};
use super::stage::Stage;
use serde_json::Value;
use std::collections::BTreeMap;

/// Turns that are sent to idle workers to see who decides.
const QUIET_TURNS: usize = 8;
/// Turns that a shadow is asked about before its counts are looked at.
const SHADOWED: f64 = 30.0;
/// Conversations that a canary is watched for. A quarter of them on its side are as good as never none, nor half of them.
const CONVERSATIONS: usize = 60;
/// The idle worker that the policy takes, the first of equals; changed it takes the last.
const FIRST: &str = "quiet-0";
const LAST: &str = "quiet-2";

/// The commands, as the guide has them.
pub mod commands {
    /// Makes the project.
    pub const NEW: &str = "turnstile plugin new my-policy --lang";
    /// Builds it.
    pub const BUILD: &str = "make";
    /// Its tests.
    pub const TEST: &str = "make test";
    /// What the module is.
    pub const CHECK: &str = "turnstile plugin check build/my-policy.wasm";
    /// Its decisions.
    pub const CASES: &str = "turnstile plugin run build/my-policy.wasm --cases cases";
    /// What a decision costs.
    pub const BENCH: &str = "turnstile plugin bench build/my-policy.wasm";
    /// To the gateway's configuration.
    pub const DEPLOY: &str = "cp build/my-policy.wasm ../gateway/";
    /// The request that it has to get through before it goes live.
    pub const SELF_TEST: &str = "cp cases/least-loaded-of-the-warm/turn.json ../gateway/";
    /// What the gateway would run.
    pub const CHECK_CONFIG: &str = "turnstile check --config ../gateway/turnstile.toml";
    /// Who decides about a request.
    pub const EXPLAIN: &str = "turnstile explain question.json";
    /// Back.
    pub const ROLLBACK: &str = "turnstile rollback";
}

/// What a step comes to: what was seen, and what the next needs.
type Seen<T> = Result<(String, T), String>;

/// From the empty folder to a module that does what its cases say.
pub async fn write(project: &Project, account: &mut Account) -> Option<()> {
    account.step("new", new(project).await)?;
    account.step("build", build(project).await)?;
    account.step("check", check(project).await)?;
    account.step("run", cases(project).await)?;
    account.step("test", project.run(commands::TEST).await.and_then(|text| counted(&text, "13 passed, 0 failed")))?;
    account.step("bench", bench(project).await)
}

async fn new(project: &Project) -> Seen<()> {
    let said = project.run_above(&format!("{} {}", commands::NEW, project.language.name())).await?;
    let (_, needs) = said.lines().next().and_then(|line| line.split_once("; it needs ")).unwrap_or_default();
    Ok((format!("a project that needs {needs}"), ()))
}

async fn build(project: &Project) -> Seen<()> {
    project.run(commands::BUILD).await?;
    let module = project.folder().join("build/my-policy.wasm");
    let size = std::fs::metadata(&module).map_err(|e| format!("{}: {e}", module.display()))?.len();
    Ok((format!("a module of {} KiB", size.div_ceil(1024)), ()))
}

async fn check(project: &Project) -> Seen<()> {
    let text = project.run(commands::CHECK).await?;
    let abi = text
        .lines()
        .map(str::trim)
        .find(|line| line.starts_with("ABI "))
        .ok_or_else(|| format!("no ABI in: {text}"))?;
    Ok((abi.split_whitespace().collect::<Vec<_>>().join(" "), ()))
}

async fn cases(project: &Project) -> Seen<()> {
    counted(&project.run(commands::CASES).await?, "13 passed, 0 failed")
}

async fn bench(project: &Project) -> Seen<()> {
    let text = project.run(commands::BENCH).await?;
    let line = text
        .lines()
        .find(|line| line.starts_with("proxy_on_request_headers "))
        .ok_or_else(|| format!("no times in: {text}"))?;
    let times: Vec<&str> = line.split("  ").map(str::trim).filter(|part| part.ends_with("µs")).collect();
    Ok((format!("a decision takes {} (median, p99, most; a debug build)", times.join(", ")), ()))
}

fn counted(text: &str, count: &str) -> Seen<()> {
    if text.contains(count) { Ok((count.to_owned(), ())) } else { Err(format!("not {count:?}:\n{text}")) }
}

/// From the shadow to production, to a changed version, and back.
pub async fn to_production_and_back(project: &Project, stage: &mut Stage, account: &mut Account) -> Option<()> {
    account.step("shadow", shadow(project, stage).await)?;
    account.step("canary", canary(project, stage).await)?;
    account.step("promoted", promoted(project, stage).await)?;
    account.step("change", change(project).await)?;
    let changed = account.step("swapped", swapped(project, stage).await)?;
    account.step("rollback", rollback(project, stage, changed).await)
}

fn text<'a>(record: &'a Value, member: &str) -> &'a str {
    record[member].as_str().unwrap_or_default()
}

/// Whether the policy chose the worker.
fn decided(record: &Value) -> bool {
    text(record, "reason").starts_with(REASON)
}

async fn shadow(project: &Project, stage: &mut Stage) -> Seen<()> {
    project.run(commands::SELF_TEST).await?;
    project.run(commands::DEPLOY).await?;
    let generation = stage.edit(Station::Shadow).await?;
    project.run(commands::CHECK_CONFIG).await?;
    let counts = stage
        .until("the shadow differs, at a cost", async |stage| {
            let metrics = stage.metrics().await?;
            let decisions = |result| {
                metrics.sum(
                    "turnstile_shadow_decisions_total",
                    &[("plugin", NAME), ("about", "worker"), ("result", result)],
                )
            };
            let cost = |direction| {
                metrics.sum("turnstile_shadow_cost_ms_total", &[("plugin", NAME), ("direction", direction)])
            };
            let (same, other) = (decisions("same"), decisions("other"));
            // Nothing added up is below zero, as the machine writes it.
            let (dearer, cheaper) = (cost("dearer") + 0.0, cost("cheaper") + 0.0);
            let enough = same + other >= SHADOWED && same > 0.0 && other > 0.0 && dearer + cheaper > 0.0;
            Ok(enough.then_some((same, other, dearer, cheaper)))
        })
        .await?;
    let mut differs = 0;
    for _ in 0..QUIET_TURNS {
        let record = stage.ask_quietly().await?;
        let wanted =
            record["shadows"].as_array().and_then(|shadows| shadows.first()).map(|shadow| text(shadow, "worker"));
        if decided(&record) || wanted == Some(text(&record, "worker")) {
            return Err(format!("the shadow was followed: {record}"));
        }
        // Of equal workers it wants the first, always.
        if wanted.is_none_or(|wanted| wanted == FIRST) && (wanted.is_none() == (text(&record, "worker") == FIRST)) {
            differs += usize::from(wanted.is_some());
        } else {
            return Err(format!("the shadow is told wrongly: {record}"));
        }
    }
    let records = stage.served_by(generation).await?;
    if let Some(record) = records.iter().find(|record| decided(record) || record.get("notes").is_some()) {
        return Err(format!("something of the shadow was applied: {record}"));
    }
    let (same, other, dearer, cheaper) = counts;
    Ok((
        format!(
            "asked {} times, {other} of them otherwise than done ({dearer:.1} ms dearer, {cheaper:.1} ms cheaper by prediction); of \
             {QUIET_TURNS} turns on idle workers {differs} went elsewhere; nothing applied",
            same + other
        ),
        (),
    ))
}

async fn canary(_: &Project, stage: &mut Stage) -> Seen<()> {
    let generation = stage.edit(Station::Canary).await?;
    let sides = stage
        .until("enough conversations were on a side", async |stage| {
            let mut sides: BTreeMap<String, Vec<bool>> = BTreeMap::new();
            for record in stage.records(generation)? {
                let by_canary = record["canaries"] == serde_json::json!([NAME]);
                if decided(&record) != by_canary {
                    return Err(format!("another policy decided: {record}"));
                }
                sides.entry(text(&record, "session").to_owned()).or_default().push(by_canary);
            }
            Ok((sides.len() >= CONVERSATIONS).then_some(sides))
        })
        .await?;
    if let Some((session, sides)) = sides.iter().find(|(_, sides)| sides.windows(2).any(|pair| pair[0] != pair[1])) {
        return Err(format!("session {session} was on both sides: {sides:?}"));
    }
    let on = sides.values().filter(|sides| sides.first() == Some(&true)).count();
    if on == 0 || 2 * on >= sides.len() {
        return Err(format!("{on} of {} sessions are not a quarter", sides.len()));
    }
    let plugin = stage.plugin().await?;
    if !plugin["canary"]["aside"].is_null() {
        return Err(format!("it was set aside: {}", plugin["canary"]));
    }
    Ok((format!("decided for {on} of {} conversations, each on one side only", sides.len()), ()))
}

/// Turns on idle workers, all of which the policy has to send to one.
async fn all_to(stage: &mut Stage, worker: &str) -> Result<(), String> {
    for _ in 0..QUIET_TURNS {
        let record = stage.ask_quietly().await?;
        if !decided(&record) || text(&record, "worker") != worker {
            return Err(format!("{worker} was to be chosen by the policy: {record}"));
        }
    }
    Ok(())
}

/// What `turnstile explain` says of such a turn.
async fn explained(project: &Project, stage: &Stage) -> Result<String, String> {
    project.write("question.json", &Stage::quiet_question())?;
    let text = project.run(&format!("{} --admin {}", commands::EXPLAIN, stage.gateway.admin)).await?;
    let answer: Value = serde_json::from_str(&text).map_err(|e| format!("turnstile explain: {e}: {text}"))?;
    Ok(format!("{}, {}", self::text(&answer, "worker"), self::text(&answer, "reason")))
}

async fn promoted(project: &Project, stage: &mut Stage) -> Seen<()> {
    let generation = stage.edit(Station::Promoted).await?;
    let Traffic { turns: before, .. } = stage.agents.traffic()?;
    let Traffic { turns, .. } = stage.goes_on().await?;
    let records = stage.served_by(generation).await?;
    if !records.iter().all(decided) {
        return Err(format!("another policy decided: {records:?}"));
    }
    all_to(stage, FIRST).await?;
    stage.quiet_is_idle().await?;
    let explained = explained(project, stage).await?;
    if !explained.starts_with(&format!("{FIRST}, {REASON}")) {
        return Err(format!("turnstile explain says {explained}"));
    }
    Ok((format!("decided about all of {} turns; explain: {explained}", turns - before), ()))
}

async fn change(project: &Project) -> Seen<()> {
    let edit = project.language.change();
    project.edit(&edit)?;
    project.run(commands::BUILD).await?;
    let printed = project.print(commands::CASES, &project.folder()).await?;
    if printed.good || !printed.text.contains("11 passed, 2 failed") {
        return Err(format!("two cases were to fail:\n{}", printed.text));
    }
    for case in &ALTERED_CASES {
        project.edit(case)?;
    }
    counted(&project.run(commands::TEST).await?, "13 passed, 0 failed")?;
    Ok((format!("{} edited, rebuilt; 2 of 13 cases told the change, and pass with what is wanted now", edit.file), ()))
}

/// Returns the generation that the changed version came with.
async fn swapped(project: &Project, stage: &mut Stage) -> Seen<u64> {
    let (before, old) = (stage.generation().await?, stage.plugin().await?["sha256"].clone());
    project.run(commands::DEPLOY).await?;
    let generation = stage.next_generation(before).await?;
    if stage.plugin().await?["sha256"] == old {
        return Err("the module is the same".to_owned());
    }
    all_to(stage, LAST).await?;
    stage.goes_on().await?;
    Ok((
        format!("generation {generation} in the place of {before}; turns on idle workers go to {LAST}, not {FIRST}"),
        generation,
    ))
}

async fn rollback(project: &Project, stage: &mut Stage, changed: u64) -> Seen<()> {
    let said = project.run(&format!("{} --admin {}", commands::ROLLBACK, stage.gateway.admin)).await?;
    let now = stage.generation().await?;
    if now <= changed {
        return Err(format!("still generation {now}: {said}"));
    }
    all_to(stage, FIRST).await?;
    if stage.admin("/config").await?["follows_file"] != false {
        return Err("the file is followed, which would bring the changed version back".to_owned());
    }
    stage.goes_on().await?;
    let records = stage.served_by(now).await?;
    if !records.iter().all(decided) {
        return Err(format!("another policy decided: {records:?}"));
    }
    let told: Value = serde_json::from_str(&said).map_err(|e| format!("turnstile rollback: {e}: {said}"))?;
    if told["generation"] != changed || told["restored_as"] != now {
        return Err(format!("from {changed} to {now}, and turnstile rollback says {said}"));
    }
    let former = &told["restored_from"];
    Ok((format!("generation {former} serves again, as {now}; turns on idle workers go to {FIRST} again"), ()))
}
