//! What the subcommands do. Every error is a text for the terminal.

use crate::admin_client::ask;
use crate::cli::{CheckArgs, Command, ExplainArgs, RollbackArgs, RunArgs, SimArgs, WorkersAction, WorkersArgs};
use crate::generation::{Foundation, problems};
use crate::metrics::Metrics;
use crate::reload::Source;
use crate::replay::args::ReplayArgs;
use crate::run::{Running, thread_count};
use crate::workbench::arguments::PluginArgs;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use turnstile_config::{Config, LogFormat, Logging};

type Outcome = Result<(), String>;

/// Guests run on the serving threads: their stack (1 MiB of wasm) and ours.
const THREAD_STACK: usize = 4 << 20;

/// `turnstile run`.
///
/// # Errors
/// Why it did not start.
pub fn run(args: RunArgs) -> Outcome {
    let source = source(&args)?;
    let config = source.read()?;
    init_logging(&config.logging);
    for warning in config.warnings() {
        tracing::warn!("{warning}");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(thread_count(&config))
        .thread_stack_size(THREAD_STACK)
        .thread_name("turnstile")
        .enable_all()
        .build()
        .map_err(|e| e.to_string())?;
    let outcome = runtime.block_on(async {
        // Before anything else: a signal during the start must not be the end of a process that holds something.
        let fail = |e: std::io::Error| e.to_string();
        let mut terminate = signal(SignalKind::terminate()).map_err(fail)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(fail)?;
        let mut hang_up = signal(SignalKind::hangup()).map_err(fail)?;
        let running = Running::start(source).await.map_err(|e| e.to_string())?;
        loop {
            tokio::select! {
                _ = terminate.recv() => break,
                _ = interrupt.recv() => break,
                // What went wrong with a reload is in the log.
                _ = hang_up.recv() => { let _ = running.reload().await; }
            }
        }
        let hurry = CancellationToken::new();
        let stop = running.stop_unless(&hurry);
        tokio::pin!(stop);
        loop {
            tokio::select! {
                () = &mut stop => return Ok(()),
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if hurry.is_cancelled() {
                tracing::warn!("third signal: ending at once; engine sessions may be left open");
                return Ok(());
            }
            tracing::warn!("second signal: cutting turns; a third one ends at once");
            hurry.cancel();
        }
    });
    runtime.shutdown_timeout(Duration::from_secs(1));
    outcome
}

fn source(args: &RunArgs) -> Result<Source, String> {
    let address = |option: &str, text: &str| {
        text.parse::<SocketAddr>()
            .map_err(|_| format!("{option}: expected HOST:PORT with an IP address, found {text:?}"))
    };
    let fixed = if args.worker.is_empty() {
        None
    } else {
        Some(Config::from_workers(&args.worker).map_err(|e| e.to_string())?)
    };
    Ok(Source {
        path: args.config.clone(),
        fixed,
        listen: args.listen.as_deref().map(|a| address("--listen", a)).transpose()?,
        admin: match args.admin.as_deref() {
            None => None,
            Some("off") => Some(None),
            Some(a) => Some(Some(address("--admin", a)?)),
        },
        explain_headers: args.explain_headers,
    })
}

fn init_logging(logging: &Logging) {
    let level: LevelFilter = logging.level.as_str().parse().unwrap_or(LevelFilter::INFO);
    // pingora logs as errors what is ordinary here (a pooled connection that was just closed, a client that left); what
    // matters of it is in the access log.
    let pingora = if level >= LevelFilter::DEBUG { level } else { LevelFilter::OFF };
    let targets = Targets::new().with_default(level).with_target("pingora", pingora);
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_target(false);
    let registry = tracing_subscriber::registry().with(targets);
    // A second initialisation, as in a test, leaves the first in place.
    let _ = match logging.format {
        LogFormat::Json => registry.with(layer.json().flatten_event(true)).try_init(),
        LogFormat::Text => registry.with(layer).try_init(),
    };
}

/// `turnstile check`.
///
/// # Errors
/// Everything that is wrong with the file.
pub fn check(args: &CheckArgs) -> Outcome {
    let config = Config::load(&args.config).map_err(|e| e.to_string())?;
    for warning in config.warnings() {
        eprintln!("warning: {warning}");
    }
    let foundation = Foundation::new(&config).map_err(|e| e.to_string())?;
    let problems = problems(&config, &foundation);
    if problems.is_empty() {
        return print(&config.summary());
    }
    let lines: Vec<String> = problems.iter().map(|p| format!("{}: {p}", args.config.display())).collect();
    Err(lines.join("\n"))
}

/// `turnstile schema`.
///
/// # Errors
/// Standard output cannot be written.
pub fn schema() -> Outcome {
    let text = serde_json::to_string_pretty(turnstile_config::schema()).map_err(|e| e.to_string())?;
    print(&format!("{text}\n"))
}

/// `turnstile metrics`.
///
/// # Errors
/// Standard output cannot be written.
pub fn metrics() -> Outcome {
    print(&Metrics::new().map_err(|e| e.to_string())?.document())
}

fn print(text: &str) -> Outcome {
    match std::io::stdout().write_all(text.as_bytes()) {
        // The reader closed its end: it has seen enough.
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(|e| e.to_string()),
    }
}

/// `turnstile explain`: asks the admin listener of a running gateway.
///
/// # Errors
/// The file, the header, or the gateway's answer.
pub fn explain(args: &ExplainArgs) -> Outcome {
    let mut body = String::new();
    if args.body.as_os_str() == "-" {
        std::io::stdin().read_to_string(&mut body).map_err(|e| format!("standard input: {e}"))?;
    } else {
        body = std::fs::read_to_string(&args.body).map_err(|e| format!("{}: {e}", args.body.display()))?;
    }
    let raw: Box<serde_json::value::RawValue> =
        serde_json::from_str(&body).map_err(|e| format!("{}: {e}", args.body.display()))?;
    let mut headers = BTreeMap::new();
    for header in &args.headers {
        let (name, value) =
            header.split_once(':').ok_or_else(|| format!("--header: expected NAME:VALUE, found {header:?}"))?;
        headers.insert(name.trim(), value.trim());
    }
    let question = serde_json::json!({"path": args.path, "headers": headers, "body": raw}).to_string();
    print(&ask(&args.admin, "POST", "/explain", &question, Duration::ZERO)?)
}

/// `turnstile workers`: asks the admin listener of a running gateway.
///
/// # Errors
/// The gateway's answer, or that a worker is not empty after all the time it was given.
pub fn workers(args: &WorkersArgs) -> Outcome {
    let path = |id: &str, action: &str| format!("/workers/{}/{action}", utf8_percent_encode(id, NON_ALPHANUMERIC));
    match &args.action {
        None => print(&ask(&args.admin, "GET", "/workers", "", Duration::ZERO)?),
        Some(WorkersAction::Undrain { id }) => {
            print(&ask(&args.admin, "POST", &path(id, "undrain"), "", Duration::ZERO)?)
        }
        Some(WorkersAction::Drain { id, wait }) => {
            let query = wait.map(|seconds| format!("?wait={seconds}")).unwrap_or_default();
            let waited = Duration::from_secs(wait.unwrap_or(0));
            let answer = ask(&args.admin, "POST", &format!("{}{query}", path(id, "drain")), "", waited)?;
            print(&answer)?;
            let left: serde_json::Value = serde_json::from_str(&answer).map_err(|e| e.to_string())?;
            match wait {
                Some(seconds) if left["empty"] != true => Err(format!("{id} is not empty after {seconds} s")),
                _ => Ok(()),
            }
        }
    }
}

/// `turnstile rollback`: asks the admin listener of a running gateway.
///
/// # Errors
/// The gateway's answer: there is nothing to go back to, or it cannot be restored.
pub fn rollback(args: &RollbackArgs) -> Outcome {
    let path = if args.refuse { "/plugins/rollback?refuse=true" } else { "/plugins/rollback" };
    print(&ask(&args.admin, "POST", path, "", Duration::ZERO)?)
}

/// Runs what the command line says.
///
/// # Errors
/// See the commands.
pub fn dispatch(command: Command) -> Outcome {
    match command {
        Command::Run(args) => run(args),
        Command::Check(args) => check(&args),
        Command::Explain(args) => explain(&args),
        Command::Workers(args) => workers(&args),
        Command::Rollback(args) => rollback(&args),
        Command::Plugin(args) => plugin(&args),
        Command::Sim(args) => sim(args),
        Command::Replay(args) => replay(&args),
        Command::Schema => schema(),
        Command::Metrics => metrics(),
    }
}

/// `turnstile plugin`.
///
/// # Errors
/// See [`workbench`](crate::workbench).
pub fn plugin(args: &PluginArgs) -> Outcome {
    let said = crate::workbench::dispatch(&args.action)?;
    print(&said.out)?;
    eprint!("{}", said.aside);
    said.failed.map_or(Ok(()), Err)
}

/// `turnstile replay`.
///
/// # Errors
/// What is wrong with the command line, a file, or a policy.
pub fn replay(args: &ReplayArgs) -> Outcome {
    print(&crate::replay::run(args)?)
}

/// `turnstile sim`.
///
/// # Errors
/// A port that cannot be bound.
pub fn sim(args: SimArgs) -> Outcome {
    crate::simulate::run(args)
}
