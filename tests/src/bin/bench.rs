//! `turnstile-bench`: CPU time per request of the gateway beside a plain pingora proxy in the same run, and the weight of its
//! parts. It reports; it never fails because a number is large.

#![forbid(unsafe_code)]

#[path = "../bench/load.rs"]
mod load;
#[path = "../bench/micro.rs"]
mod micro;
#[path = "../bench/plain.rs"]
mod plain;
#[path = "../bench/plugins.rs"]
mod plugins;
#[path = "../bench/process.rs"]
mod process;
#[path = "../bench/report.rs"]
mod report;
#[path = "../bench/requests.rs"]
mod requests;
#[path = "../bench/rounds.rs"]
mod rounds;
#[path = "../bench/upstream.rs"]
mod upstream;

use report::Figure;
use rounds::{Effort, Proxies};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const HELP: &str = "\
CPU time per request of the gateway beside a plain pingora proxy, and the weight of its parts.

Usage: turnstile-bench [--quick | --rounds N] [--only TEXT] [--json FILE]
       turnstile-bench --plugins [--quick | --rounds N] [--only TEXT] [--filter NAME=FILE ...] [--envoy FILE]

  --plugins    the price of plugins instead: no plugin, the three policies, filters; each beside plain pingora and, with
               --envoy, beside an Envoy with the same filter
  --filter NAME=FILE
               a module to measure as a filter, besides the no-op that comes with the repository
  --envoy FILE an Envoy binary

  --quick      one short round: shows that everything runs, numbers are rough
  --rounds N   so many rounds, 1 to 1000, instead of 7: more of them tell close figures apart on a machine that does other things
  --only TEXT  only requests whose name has TEXT in it (\"500 B\", \"SSE\"), and nothing else
  --json FILE  writes every number there, round by round
  --help       this text
";

#[derive(Default)]
struct Options {
    quick: bool,
    rounds: Option<usize>,
    only: String,
    json: Option<PathBuf>,
    plugins: bool,
    filters: Vec<(String, PathBuf)>,
    envoy: Option<PathBuf>,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["--help" | "-h"] => {
            print!("{HELP}");
            Ok(())
        }
        ["--role", "upstream", ports] => upstream::run(ports.parse().unwrap_or(1)),
        ["--role", "plain", address, upstreams] => role_plain(address, upstreams),
        words => options(words).and_then(|options| if options.plugins { price(&options) } else { bench(&options) }),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("turnstile-bench: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn role_plain(address: &str, upstreams: &str) -> Result<(), String> {
    let parse = |text: &str| text.parse().map_err(|_| format!("not an address: {text:?}"));
    let upstreams = upstreams.split(' ').map(parse).collect::<Result<_, String>>()?;
    plain::run(parse(address)?, upstreams);
    Ok(())
}

fn options(words: &[&str]) -> Result<Options, String> {
    let mut options = Options::default();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        match (*word, words.as_slice().first()) {
            ("--quick", _) => options.quick = true,
            ("--rounds", Some(number)) => {
                let rounds = number.parse().ok().filter(|rounds| (1..=1000).contains(rounds));
                options.rounds = Some(rounds.ok_or_else(|| format!("--rounds {number}: a number from 1 to 1000"))?);
                words.next();
            }
            ("--plugins", _) => options.plugins = true,
            ("--filter", Some(text)) => {
                let (name, file) =
                    text.split_once('=').ok_or_else(|| format!("--filter {text}: NAME=FILE is expected"))?;
                options.filters.push((name.to_owned(), PathBuf::from(file)));
                words.next();
            }
            ("--envoy", Some(path)) => {
                options.envoy = Some(PathBuf::from(path));
                words.next();
            }
            ("--json", Some(path)) => {
                options.json = Some(PathBuf::from(path));
                words.next();
            }
            ("--only", Some(text)) => {
                options.only = (*text).to_owned();
                words.next();
            }
            (other, _) => return Err(format!("what is {other:?}?\n\n{HELP}")),
        }
    }
    Ok(options)
}

/// What plugins cost.
fn price(options: &Options) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| e.to_string())?;
    let dir = tempfile::Builder::new().prefix("turnstile-bench-").tempdir().map_err(|e| e.to_string())?;
    let table =
        runtime.block_on(plugins::measure(dir.path(), &effort(options), &options.filters, options.envoy.as_deref()))?;
    println!("{table}");
    Ok(())
}

fn effort(options: &Options) -> Effort {
    let only = options.only.clone();
    if options.quick {
        Effort { only, rounds: options.rounds.unwrap_or(1), divide: 10, idle: 400 }
    } else {
        Effort { only, rounds: options.rounds.unwrap_or(7), divide: 1, idle: 2000 }
    }
}

fn bench(options: &Options) -> Result<(), String> {
    let effort = effort(options);
    let dir = tempfile::Builder::new().prefix("turnstile-bench-").tempdir().map_err(|e| e.to_string())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| e.to_string())?;
    let mut figures = Vec::new();
    if effort.only.is_empty() {
        // Before anything else has grown this process.
        let session = micro::session_bytes(if options.quick { 20_000 } else { 100_000 })?;
        let _within = runtime.enter();
        figures = inside(dir.path(), options.quick)?;
        figures.push(Figure {
            name: "one live session (tag mode)".into(),
            value: session,
            unit: "B",
            budget: "<= 1 KB",
        });
    }
    let cases = runtime.block_on(async {
        let proxies = Proxies::start(dir.path()).await?;
        if effort.only.is_empty() {
            figures.extend(proxies.idle_connections(effort.idle).await?);
        }
        let cases = proxies.cases(&effort).await?;
        proxies.stop().await?;
        Ok::<_, String>(cases)
    })?;
    println!("{}", report::table(&cases, &figures));
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&report::json(&cases, &figures)).map_err(|e| e.to_string())?;
        std::fs::write(path, text + "\n").map_err(|e| format!("{}: {e}", path.display()))?;
    }
    Ok(())
}

fn inside(dir: &Path, quick: bool) -> Result<Vec<Figure>, String> {
    // A batch has to last a few ticks of the kernel's clock, by which CPU time is counted.
    let calls = if quick { 2000 } else { 4000 };
    let mut figures = Vec::new();
    for (workers, budget) in [(8, "<= 25 us"), (256, "<= 150 us")] {
        let full = micro::Rig::new(workers, true, dir)?.decision_us(calls)?;
        let native = micro::Rig::new(workers, false, dir)?.decision_us(calls)?;
        let name = format!("full decision, {workers} workers, three wasm policies");
        figures.push(Figure { name, value: full, unit: "us", budget });
        let name = format!("full decision, {workers} workers, no plugins");
        figures.push(Figure { name, value: native, unit: "us", budget: "" });
    }
    let rig = micro::Rig::new(1, false, dir)?;
    let (ours, parser) = rig.understanding_gb_s(if quick { 50 } else { 200 })?;
    let name = "understanding a 1 MB body (scan, hints, identity, hashes)".into();
    figures.push(Figure { name, value: ours, unit: "GB/s", budget: ">= 2 GB/s" });
    let name = "for comparison: serde_json finding its top-level members".into();
    figures.push(Figure { name, value: parser, unit: "GB/s", budget: "" });
    let blocks = micro::index_bytes_per_block(if quick { 32_768 } else { 262_144 });
    figures.push(Figure { name: "prefix index, per block, full".into(), value: blocks, unit: "B", budget: "<= 48 B" });
    Ok(figures)
}
