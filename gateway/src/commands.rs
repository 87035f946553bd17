//! What the subcommands do. Every error is a text for the terminal.

use crate::cli::{CheckArgs, ExplainArgs, RunArgs, SimArgs};
use crate::generation::{Foundation, problems};
use crate::metrics::Metrics;
use crate::reload::Source;
use crate::run::{Running, thread_count};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
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
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(thread_count(&config))
        .thread_stack_size(THREAD_STACK)
        .thread_name("turnstile")
        .enable_all()
        .build()
        .map_err(|e| e.to_string())?;
    let outcome = runtime.block_on(async {
        let running = Running::start(source).await.map_err(|e| e.to_string())?;
        let fail = |e: std::io::Error| e.to_string();
        let mut terminate = signal(SignalKind::terminate()).map_err(fail)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(fail)?;
        let mut hang_up = signal(SignalKind::hangup()).map_err(fail)?;
        loop {
            tokio::select! {
                _ = terminate.recv() => break,
                _ = interrupt.recv() => break,
                // What went wrong with a reload is in the log.
                _ = hang_up.recv() => { let _ = running.reload().await; }
            }
        }
        tracing::info!("stopping");
        tokio::select! {
            () = running.stop() => {}
            _ = terminate.recv() => tracing::warn!("second signal: stopping at once"),
            _ = interrupt.recv() => tracing::warn!("second signal: stopping at once"),
        }
        Ok(())
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
    let authorization = args.token.as_ref().map(|t| format!("authorization: Bearer {t}\r\n")).unwrap_or_default();
    let request = format!(
        "POST /explain HTTP/1.1\r\nhost: {}\r\nconnection: close\r\ncontent-type: application/json\r\n{authorization}content-length: {}\r\n\r\n",
        args.admin,
        question.len()
    );
    let fail = |e: std::io::Error| format!("{}: {e}", args.admin);
    let mut stream = TcpStream::connect(&args.admin).map_err(fail)?;
    stream.set_read_timeout(Some(Duration::from_secs(30))).map_err(fail)?;
    stream.write_all(request.as_bytes()).and_then(|()| stream.write_all(question.as_bytes())).map_err(fail)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).map_err(fail)?;
    let (head, text) = answer.split_once("\r\n\r\n").ok_or_else(|| format!("{}: not an HTTP answer", args.admin))?;
    let status = head.split_whitespace().nth(1).unwrap_or_default();
    if status == "200" { print(text) } else { Err(format!("{} answered {status}: {}", args.admin, text.trim())) }
}

/// `turnstile sim`.
///
/// # Errors
/// A port that cannot be bound.
pub fn sim(args: SimArgs) -> Outcome {
    crate::simulate::run(args)
}
