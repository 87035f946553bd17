//! `turnstile plugin`: the tools of those who write policies.
//!
//! Everything here runs the code that serves requests: [`situation`] understands the turn and makes the facts, the plugin
//! host runs the module, and the decision is settled as the gateway settles it.

pub mod arguments;
pub mod bench;
pub mod check;
pub mod compile;
pub mod expectation;
pub mod filter;
pub mod fleet_file;
pub mod meter;
pub mod project;
pub mod situation;
pub mod subject;
pub mod text;
pub mod trace;
pub mod trial;
pub mod waiting;

use arguments::{BenchArgs, CheckModuleArgs, CompileArgs, GivenArgs, PluginAction, TryArgs};
use bench::Load;
use filter::callees::Callees;
use filter::exchange_file::Exchange;
use serde_json::Value;
use situation::Situation;
use std::path::{Path, PathBuf};
use std::time::Duration;
use subject::Subject;
use turnstile_config::Phase;
use turnstile_plugins::Runtime;

/// What a tool has to say: text for standard output and for standard error. An error ends the process with 1 after both.
#[derive(Debug, Default)]
pub struct Said {
    /// For standard output.
    pub out: String,
    /// For standard error.
    pub aside: String,
    /// Why it failed.
    pub failed: Option<String>,
}

/// Does what `turnstile plugin` was told to.
///
/// # Errors
/// A file that cannot be read or is not what it should be, a plugin that does not start.
pub fn dispatch(action: &PluginAction) -> Result<Said, String> {
    match action {
        PluginAction::Check(args) => check_module(args),
        PluginAction::Compile(args) => compile_module(args),
        PluginAction::Run(args) => try_plugin(args),
        PluginAction::Bench(args) => bench_plugin(args),
        PluginAction::New(args) => project::create(args).map(|out| Said { out, ..Said::default() }),
    }
}

fn check_module(args: &CheckModuleArgs) -> Result<Said, String> {
    let subject = Subject::read(&args.file, &args.given)?;
    let report = check::check(&subject)?;
    let out = if args.json { pretty(&report.json) } else { report.text() };
    let failed = (!report.good).then(|| format!("{}: cannot be used", args.file.display()));
    Ok(Said { out, aside: String::new(), failed })
}

fn compile_module(args: &CompileArgs) -> Result<Said, String> {
    let subject = Subject::read(&args.file, &GivenArgs::default())?;
    let out = match &args.out {
        Some(out) => compile::into_file(&subject, out)?,
        None => compile::into_cache(&subject, compile::cache_of(args.gateway_config.as_deref())?)?,
    };
    Ok(Said { out, ..Said::default() })
}

fn try_plugin(args: &TryArgs) -> Result<Said, String> {
    let runtime = subject::runtime(compile::cache_of(None)?)?;
    let phase = Phase::from(args.phase);
    if let Some(cases) = &args.cases {
        return run_cases(&args.file, cases, &args.given, phase, &runtime);
    }
    let fleet = match (&args.fleet, phase) {
        (Some(_), Phase::Filter) => return Err("--fleet: a filter sees no fleet".to_owned()),
        (None, Phase::Admit | Phase::Route) => return Err("--fleet must be given, but for --phase filter".to_owned()),
        (fleet, _) => fleet.clone(),
    };
    let turn = args.turn.clone().ok_or("--turn or --cases must be given")?;
    let case = Case { turn, fleet, given: args.given.clone(), expect: args.expect.clone() };
    run_one(&args.file, &case, phase, args.json, &runtime)
}

fn bench_plugin(args: &BenchArgs) -> Result<Said, String> {
    let subject = Subject::read(&args.file, &args.given)?;
    let phase = Phase::from(args.phase);
    let runtime = subject::runtime(compile::cache_of(None)?)?;
    let text = |file: &Option<PathBuf>, sample: &str| match file {
        Some(path) => input(path),
        None => Ok(("the sample".to_owned(), sample.as_bytes().to_vec())),
    };
    let say = |report: &Value| {
        let out = if args.json { pretty(report) } else { bench::text(report) };
        Said { out, ..Said::default() }
    };
    if phase == Phase::Filter {
        if args.fleet.is_some() {
            return Err("--fleet: a filter sees no fleet".to_owned());
        }
        let (name, exchange) = text(&args.turn, bench::SAMPLE_EXCHANGE)?;
        let exchange = Exchange::parse(&exchange).map_err(|e| format!("{name}: {e}"))?;
        return bench::bench(&subject, Load::Exchange(&exchange), &runtime, args.turns).map(|report| say(&report));
    }
    let turn = text(&args.turn, bench::SAMPLE.0)?;
    // The sample's session belongs to the sample's turn.
    let fleet = match (&args.turn, &args.fleet) {
        (Some(_), None) => return Err("--fleet must be given with --turn".to_owned()),
        _ => text(&args.fleet, bench::SAMPLE.1)?,
    };
    let situation = Situation::new((&turn.0, &turn.1), (&fleet.0, &fleet.1), phase)?;
    bench::bench(&subject, Load::Turn(&situation, phase), &runtime, args.turns).map(|report| say(&report))
}

/// The files of one trial.
#[derive(Debug, Clone)]
pub struct Case {
    /// The request.
    pub turn: PathBuf,
    /// The fleet, for a policy.
    pub fleet: Option<PathBuf>,
    /// What the plugin is started with.
    pub given: GivenArgs,
    /// What the report must have.
    pub expect: Option<PathBuf>,
}

/// What came of one.
pub struct Outcome {
    /// The report, the same for the same plugin and files.
    pub report: Value,
    /// Why a gateway would have to do without the plugin.
    pub failed: Option<String>,
    /// How long things took, for a reader.
    pub times: String,
}

fn input(path: &Path) -> Result<(String, Vec<u8>), String> {
    let bytes = subject::read_text(path).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok((path.display().to_string(), bytes))
}

/// Runs one case.
///
/// # Errors
/// A file that cannot be read or is not what it should be, a plugin that does not start.
pub fn trial(subject: &Subject, case: &Case, phase: Phase, runtime: &Runtime) -> Result<Outcome, String> {
    let turn = input(&case.turn)?;
    let Some(fleet) = &case.fleet else {
        let exchange = Exchange::parse(&turn.1).map_err(|e| format!("{}: {e}", turn.0))?;
        let started = subject.start_among(runtime, Callees::new(&exchange.calls))?;
        let filter::Tried { report, failed } = filter::run(&started, &exchange);
        return Ok(Outcome { report, failed, times: format!("times: start {}\n", ms(started.took)) });
    };
    let fleet = input(fleet)?;
    let situation = Situation::new((&turn.0, &turn.1), (&fleet.0, &fleet.1), phase)?;
    let started = subject.start(runtime)?;
    let trial = trial::run(&started, &situation);
    let us = |time: Duration| format!("{:.1} µs", time.as_nanos() as f64 / 1e3);
    let (decide, end) = (us(trial.decide), us(trial.end));
    Ok(Outcome {
        report: trial.to_json(&started, &situation, phase),
        failed: trial.fault,
        times: format!("times: start {}, decision {decide}, end {end}\n", ms(started.took)),
    })
}

fn ms(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1e3)
}

fn run_one(file: &Path, case: &Case, phase: Phase, json: bool, runtime: &Runtime) -> Result<Said, String> {
    let subject = Subject::read(file, &case.given)?;
    let Outcome { report, failed, times } = trial(&subject, case, phase, runtime)?;
    let out = match (json, phase) {
        (true, _) => pretty(&report),
        (false, Phase::Filter) => filter::text::page(&report),
        (false, _) => text::page(&report),
    };
    let wrong = match &case.expect {
        Some(expect) => differences(expect, &report)?,
        None => failed.into_iter().collect(),
    };
    let failed = (!wrong.is_empty()).then(|| wrong.join("\n"));
    Ok(Said { out, aside: times, failed })
}

fn differences(expect: &Path, report: &Value) -> Result<Vec<String>, String> {
    let (name, bytes) = input(expect)?;
    let expected: Value = serde_json::from_slice(&bytes).map_err(|e| format!("{name}: {e}"))?;
    if !expected.is_object() {
        return Err(format!("{name}: expected a JSON object with members of the report"));
    }
    Ok(expectation::differences(&expected, report).into_iter().map(|line| format!("{name}: {line}")).collect())
}

fn run_cases(file: &Path, dir: &Path, given: &GivenArgs, phase: Phase, runtime: &Runtime) -> Result<Said, String> {
    let mut said = Said::default();
    let (mut passed, mut failed) = (0_u32, 0_u32);
    for (name, case) in cases(dir, given, phase)? {
        let outcome = Subject::read(file, &case.given)
            .and_then(|subject| trial(&subject, &case, phase, runtime))
            .and_then(|tried| case.expect.as_deref().map_or(Ok(Vec::new()), |e| differences(e, &tried.report)));
        match outcome {
            Ok(wrong) if wrong.is_empty() => {
                passed += 1;
                said.out.push_str(&format!("ok {name}\n"));
            }
            Ok(wrong) => {
                failed += 1;
                said.out.push_str(&format!("FAILED {name}\n  {}\n", wrong.join("\n  ")));
            }
            Err(error) => {
                failed += 1;
                said.out.push_str(&format!("FAILED {name}\n  {error}\n"));
            }
        }
    }
    said.out.push_str(&format!("{passed} passed, {failed} failed\n"));
    said.failed = (failed > 0).then(|| format!("{failed} of {} cases failed", passed + failed));
    Ok(said)
}

/// The cases of a folder, by name. The plugin's configuration is the case's own.
///
/// # Errors
/// It cannot be read, has no case, or a case lacks a file or has two configurations.
pub fn cases(dir: &Path, given: &GivenArgs, phase: Phase) -> Result<Vec<(String, Case)>, String> {
    let fail = |e: std::io::Error| format!("{}: {e}", dir.display());
    let mut cases = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(fail)? {
        let folder = entry.map_err(fail)?.path();
        if !folder.is_dir() {
            continue;
        }
        let file = |name: &str| {
            let path = folder.join(name);
            if path.is_file() { Ok(path) } else { Err(format!("{}: is missing", path.display())) }
        };
        let (config, config_text) = (file("config.json").ok(), file("config.txt").ok());
        if config.is_some() && config_text.is_some() {
            return Err(format!("{}: has config.json and config.txt; expected one of them", folder.display()));
        }
        let case = Case {
            turn: file("turn.json")?,
            fleet: if phase == Phase::Filter { None } else { Some(file("fleet.json")?) },
            given: GivenArgs { config, config_text, ..given.clone() },
            expect: Some(file("expect.json")?),
        };
        let name = folder.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        cases.push((name, case));
    }
    if cases.is_empty() {
        let fleet = if phase == Phase::Filter { "" } else { " fleet.json," };
        return Err(format!("{}: has no folder with a case (turn.json,{fleet} expect.json)", dir.display()));
    }
    cases.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(cases)
}

fn pretty(value: &Value) -> String {
    let mut text = serde_json::to_string_pretty(value).unwrap_or_default();
    text.push('\n');
    text
}

#[cfg(test)]
mod tests;
