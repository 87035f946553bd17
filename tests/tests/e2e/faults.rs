//! The fault table: what becomes of a turn, its session and the counts when a worker does something wrong.
//!
//! `docs/faults.md` is the table. Each of its cells is run here, and what was seen has to be what is written there
//! (`UPDATE_DOCS=1` writes it). Rules that hold for every cell are asserted besides.

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use turnstile_sim::SimConfig;
use turnstile_tests::harness::{
    Answer, Break, CHAT, FAULT, Faulty, Request, Rig, Samples, Setup, WorkerExt, built_in, chat, chat_with, until,
};

const GENERATE: &str = "/generate";

/// What a turn has of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    None,
    Tag,
    Stream,
}

const MODES: [Mode; 3] = [Mode::None, Mode::Tag, Mode::Stream];

/// One way in which a worker fails.
struct Row {
    name: &'static str,
    /// What the header asks for; nothing when the whole worker fails.
    header: Option<&'static str>,
    /// Whether this can happen to a whole answer; an error event cannot.
    whole: bool,
}

/// What became of one faulted turn.
struct Outcome {
    id: String,
    text: String,
    attempts: u64,
    status: u16,
    complete: bool,
}

/// Counters that tell what a fault counts as.
const COUNTERS: [(&str, &str); 4] = [
    ("turnstile_attempts_total", "result"),
    ("turnstile_worker_faults_total", "fault"),
    ("turnstile_retries_total", "result"),
    ("turnstile_ejections_total", "cause"),
];

fn sim() -> SimConfig {
    SimConfig {
        speed: 1000.0,
        enable_session_radix_cache: true,
        enable_streaming_session: true,
        crash_mode: true,
        default_output_tokens: 16,
        ..SimConfig::default()
    }
}

/// Workers whose health is known once, so that only turns find the fault. Nothing is taken out, no session moves because another
/// worker is cheaper, and what others do there costs nothing, so that cells do not change each other.
fn setup(workers: &[Faulty]) -> Setup {
    let [queue, binding, affinity] = built_in();
    let alone = ["margin_ms = 3600000", "decode_ms_per_request = 0", "kv_pressure_ms = 0", "queue_ms = 0"];
    let affinity = alone.iter().fold(affinity, |affinity, option| affinity.key(format!("config.{option}")));
    let stay = [queue, binding, affinity];
    let setup = workers.iter().fold(Setup::new().workers(0), |setup, worker| setup.external(worker.url()));
    setup
        .plugins(&stay)
        .set("routing.unhealthy_after", "1000")
        .set("routing.probe_interval_ms", "3600000")
        .set("routing.load_interval_ms", "3600000")
        .set("ejection.consecutive_faults", "0")
        .set("ejection.wedged_after_ms", "0")
        .set("timeouts.first_byte_s", "20")
        .set("timeouts.between_bytes_s", "20")
        .set("timeouts.connect_ms", "20000")
        .set("retry.attempts", "2")
        // Engines live a thousand times faster, and their sessions have to outlive every wait.
        .set("sessions.default_timeout_s", "36000")
}

/// For rows in which nothing comes: what else happens in them has to happen within these times.
fn impatient(setup: Setup) -> Setup {
    let setup = setup.set("timeouts.first_byte_s", "6").set("timeouts.between_bytes_s", "6");
    setup.set("timeouts.connect_ms", "6000")
}

/// Nothing comes, or never what is waited for.
fn is_silence(kind: Break) -> bool {
    use Break::{EndlessInformational, StallAfterHead, StallBefore, StallMidway};
    matches!(kind, StallBefore | StallAfterHead | StallMidway | EndlessInformational)
}

/// One cell: its requests, and what is known from the turn before the fault.
struct Cell {
    id: String,
    mode: Mode,
    stream: bool,
}

impl Cell {
    fn request(&self, text: &str, number: u32) -> Request {
        let action = if number == 1 && self.mode != Mode::None { json!("open") } else { Value::Null };
        let control = json!({"session_control": {"session_id": self.id, "action": action}});
        let text = format!("{} {text}", "All about the parser, at some length. ".repeat(40));
        let (path, mut body) = match self.mode {
            Mode::None => (CHAT, chat(&text)),
            Mode::Tag => (CHAT, chat_with(&text, control)),
            Mode::Stream => (GENERATE, json!({"text": text, "nvext": control})),
        };
        if self.stream {
            body["stream"] = json!(true);
        }
        let request = Request::json(path, &body).header("x-turnstile-explain", "1");
        request.header("x-request-id", &format!("{}-{number}", self.id))
    }

    /// The turn before, the turn with the fault, the turn after.
    async fn run(&self, rig: &Rig, workers: &[Faulty], row: &Row, when: &str) -> Outcome {
        let first = self.first(rig).await;
        self.fail(rig, workers, row, when, &first).await
    }

    async fn first(&self, rig: &Rig) -> Value {
        let answer = rig.send(&self.request("one", 1)).await;
        assert_eq!(answer.status, 200, "{}: {}", self.id, answer.text());
        rig.record_of(&answer).await
    }

    async fn fail(&self, rig: &Rig, workers: &[Faulty], row: &Row, when: &str, first: &Value) -> Outcome {
        let mut request = self.request("two", 2);
        if let Some(header) = row.header {
            request = request.header(FAULT, &format!("{when} {header}"));
        }
        let mut connection = rig.begin(&request).await;
        let Some(head) = connection.try_head().await else {
            let (id, text) = (self.id.clone(), "no answer".to_owned());
            return Outcome { id, text, attempts: 0, status: 0, complete: false };
        };
        let begin = connection.piece().await.unwrap_or_default();
        workers.iter().for_each(|worker| worker.begun(&format!("{}-2", self.id)));
        let (rest, complete) = connection.rest().await;
        let body = [begin, rest].concat().into();
        let trailers = Vec::new();
        let answer = Answer { status: head.status, headers: head.headers, body, trailers, complete };
        let second = rig.record(&format!("{}-2", self.id)).await;
        let mut text = told(&answer, &second, self.stream);
        let attempts = second["attempts"].as_u64().unwrap();
        if when == "once" {
            if answer.status == 200
                && answer.complete
                && attempts > 1
                && (self.mode == Mode::None || second["worker"] != first["worker"])
            {
                text.push_str(" from another worker");
            }
            if self.mode != Mode::None {
                let third = rig.send(&self.request("three", 3)).await;
                assert_eq!(third.status, 200, "{}, {}: {}", self.id, row.name, third.text());
                let notes = [&answer, &third].map(|a| a.header("x-turnstile-session-note").unwrap_or_default());
                let told = |what: &str| notes.iter().any(|note| note.starts_with(what));
                let third = rig.record_of(&third).await;
                // Where a conversation begins anew is decided by what the workers cost at that moment.
                text.push_str(match (told("context lost"), third["worker"] == first["worker"]) {
                    (true, _) => "; begins anew",
                    (false, true) => "; stays",
                    (false, false) => "; moves",
                });
                if told("context incomplete") {
                    text.push_str(", told of the gap");
                }
            }
        }
        Outcome { id: self.id.clone(), text, attempts, status: answer.status, complete: answer.complete }
    }
}

/// What the client got, in the words of the table.
fn told(answer: &Answer, record: &Value, stream: bool) -> String {
    let status = answer.status;
    if status != 200 {
        let code = record["error"].as_str().unwrap_or("the worker's own");
        return format!("{status} {code}");
    }
    if !answer.complete {
        return "200, cut".to_owned();
    }
    let text = answer.text();
    let whole = if stream { text.ends_with("data: [DONE]\n\n") } else { serde_json::from_str::<Value>(&text).is_ok() };
    match (whole, text.contains("\"error\":{")) {
        (true, false) => "200".to_owned(),
        (true, true) => "200, error event".to_owned(),
        (false, _) => "200, silently short".to_owned(),
    }
}

/// What the counters say, by metric and label.
fn counts(samples: &Samples) -> BTreeMap<(usize, String), f64> {
    let mut counts = BTreeMap::new();
    for (at, (metric, label)) in COUNTERS.iter().enumerate() {
        for line in samples.text().lines().filter(|line| line.starts_with(&format!("{metric}{{"))) {
            let (series, value) = line.rsplit_once(' ').unwrap();
            let name = series.split(&format!("{label}=\"")).nth(1).unwrap().split('"').next().unwrap();
            *counts.entry((at, name.to_owned())).or_insert(0.0) += value.parse::<f64>().unwrap();
        }
    }
    counts
}

/// What was counted between two scrapes, without the turns that went well.
fn counted(before: &Samples, after: &Samples) -> String {
    let before = counts(before);
    let mut columns = vec![Vec::new(); COUNTERS.len()];
    for ((at, name), value) in counts(after) {
        let more = value - before.get(&(at, name.clone())).copied().unwrap_or(0.0);
        if more > 0.0 && name != "ok" {
            columns[at].push(name);
        }
    }
    let columns = columns.iter().map(|names| if names.is_empty() { "nothing".to_owned() } else { names.join(", ") });
    columns.take(2).collect::<Vec<_>>().join(" | ")
}

/// Everything that was taken has been given back.
async fn assert_settled(rig: &Rig, closed: bool) {
    rig.idle().await;
    let quiet = async || {
        let sessions = rig.admin("/sessions").await.json();
        let workers = rig.admin("/workers").await.json();
        let metrics = rig.metrics().await;
        let in_flight = workers["workers"].as_array().unwrap().iter().all(|worker| worker["in_flight"] == 0);
        let in_flight = in_flight && sessions["counts"]["in_flight"] == 0;
        // Closes that a dead worker never answers are tried for a while.
        let leaving = ["leaving", "closing", "abandoned"].iter().all(|key| sessions["counts"][key] == 0);
        let zero = ["turnstile_requests_in_progress", "turnstile_queue_depth", "turnstile_side_queue_depth"];
        let zero = zero.iter().all(|name| metrics.sum(name, &[]) == 0.0);
        in_flight && (leaving || !closed) && workers["queue_depth"] == 0 && zero
    };
    until("all counts back at zero", quiet).await;
}

/// Rows of the table as they were seen.
#[derive(Default)]
struct Table {
    lines: String,
    cells: usize,
    /// Cells that break a rule.
    violations: Vec<String>,
}

impl Table {
    /// Adds what the cells of a row ended with.
    fn add(&mut self, row: &Row, stream: bool, outcomes: &[Outcome], counted: &str) {
        let kind = if stream { "stream" } else { "whole" };
        let _ = write!(self.lines, "| {} | {kind} |", row.name);
        for outcome in outcomes {
            self.violations.extend(violation(row, outcome));
            let _ = write!(self.lines, " {} |", outcome.text);
            self.cells += 1;
        }
        let _ = writeln!(self.lines, " {counted} |");
    }

    /// Adds a row that cannot be: its cells are explained by that.
    fn leave_out(&mut self, row: &Row) {
        let _ =
            writeln!(self.lines, "| {} | whole | cannot happen: a whole answer has no events | | | | | |", row.name);
        self.cells += 4;
    }
}

/// The cells of a row: each session mode with the fault once, and a turn that every worker fails.
fn cells(number: usize, stream: bool) -> Vec<(Cell, &'static str)> {
    let cell = |name: &str, mode| Cell { id: format!("r{number}-{name}-{stream}"), mode, stream };
    let once = MODES.map(|mode| (cell(&format!("{mode:?}"), mode), "once"));
    once.into_iter().chain([(cell("all", Mode::None), "always")]).collect()
}

/// Runs the cells of a row side by side.
async fn run_row(rig: &Rig, workers: &[Faulty], row: &Row, number: usize, stream: bool, table: &mut Table) {
    let before = rig.metrics().await;
    let all = cells(number, stream);
    let run = all.iter().map(|(cell, when)| cell.run(rig, workers, row, when));
    let outcomes = futures::future::join_all(run).await;
    assert_settled(rig, true).await;
    table.add(row, stream, &outcomes, &counted(&before, &rig.metrics().await));
}

/// Runs a row whose fault is the whole worker's. The first turns all go to that worker, for there is no other yet.
async fn run_worker_row(name: &'static str, fail: impl AsyncFn(&mut Faulty), table: &mut Table) {
    let row = Row { name, header: None, whole: true };
    for stream in [false, true] {
        let mut workers = Faulty::start(2, &sim()).await;
        let setup = setup(&workers).pool("default", "", &[0]);
        let setup = if [IGNORED, WEDGE].contains(&name) { impatient(setup) } else { setup };
        let setup = setup.set("ejection.wedged_after_ms", if name == WEDGE { "200" } else { "0" });
        // Taken out for good, not for less than what others wait for.
        let setup = setup.set("ejection.base_ms", "3600000").set("ejection.max_ms", "3600000");
        let often = if name == WEDGE { "20" } else { "3600000" };
        let mut rig = setup.set("routing.load_interval_ms", often).start().await;
        let all = cells(0, stream);
        let mut firsts = Vec::new();
        for (cell, _) in &all {
            firsts.push(cell.first(&rig).await);
        }
        rig.edit(|setup| setup.set_pool_workers("default", &[0, 1]));
        rig.generation(2).await;
        until("the other worker is ready", async || rig.gateway().ready_workers() == 2).await;
        fail(&mut workers[0]).await;
        let before = rig.metrics().await;
        let once = all.iter().zip(&firsts).filter(|((_, when), _)| *when == "once");
        let run = once.map(|((cell, when), first)| cell.fail(&rig, &workers, &row, when, first));
        let mut outcomes = futures::future::join_all(run).await;
        fail(&mut workers[1]).await;
        let (last, first) = (all.last().unwrap(), firsts.last().unwrap());
        outcomes.push(last.0.fail(&rig, &workers, &row, last.1, first).await);
        assert_settled(&rig, false).await;
        table.add(&row, stream, &outcomes, &counted(&before, &rig.metrics().await));
    }
}

const IGNORED: &str = "connection not answered";
const WEDGE: &str = "wedged: probes well, nothing moves";

const HEAD: &str = include_str!("faults_head.md");

/// Rows by ways to break an answer: every `GROUPS`th of them, on gateways of their own, one of them for those that end by time.
async fn run_group(group: usize) -> Vec<(usize, Table)> {
    let workers = Faulty::start(2, &sim()).await;
    let (patient, impatient) = (setup(&workers).start().await, impatient(setup(&workers)).start().await);
    let mut rows = Vec::new();
    for (number, (kind, name)) in Break::ALL.into_iter().enumerate().skip(group).step_by(GROUPS) {
        let row = Row { name, header: Some(name), whole: !matches!(kind, Break::ErrorEvent(_)) };
        let rig = if is_silence(kind) { &impatient } else { &patient };
        let mut table = Table::default();
        for stream in [false, true] {
            match stream || row.whole {
                true => run_row(rig, &workers, &row, number, stream, &mut table).await,
                false => table.leave_out(&row),
            }
        }
        rows.push((number, table));
    }
    rows
}

/// Rows whose fault is the whole worker's.
async fn run_worker_rows() -> Vec<(usize, Table)> {
    let mut tables = [const { Table { lines: String::new(), cells: 0, violations: Vec::new() } }; WORKER_ROWS];
    let [refused, ignored, restarted, wedged] = &mut tables;
    futures::join!(
        run_worker_row("connection refused", async |worker| worker.refuse().await, refused),
        run_worker_row(IGNORED, async |worker| worker.ignore().await, ignored),
        run_worker_row("restarted, its sessions lost", async |worker| worker.restart().await, restarted),
        run_worker_row(WEDGE, async |worker| worker.sim.hold().await, wedged),
    );
    tables.into_iter().enumerate().map(|(number, table)| (Break::ALL.len() + number, table)).collect()
}

/// Rows in which a worker answers nothing more and only `timeouts.total_s` ends the wait.
async fn run_total_rows() -> Vec<(usize, Table)> {
    let workers = Faulty::start(2, &sim()).await;
    let setup = setup(&workers).set("timeouts.first_byte_s", "600").set("timeouts.between_bytes_s", "600");
    let setup = setup.set("timeouts.total_s", "6");
    let rig = setup.start().await;
    let mut tables = Vec::new();
    let rows = [(Break::StallBefore, "total_s over before the head"), (Break::StallMidway, "total_s over midway")];
    for (place, (kind, name)) in rows.into_iter().enumerate() {
        let row = Row { name, header: Some(kind.name()), whole: true };
        let mut table = Table::default();
        let number = Break::ALL.len() + WORKER_ROWS + place;
        for stream in [false, true] {
            run_row(&rig, &workers, &row, number, stream, &mut table).await;
        }
        tables.push((number, table));
    }
    tables
}

/// Rows of [`run_worker_rows`].
const WORKER_ROWS: usize = 4;

/// Gateways side by side.
const GROUPS: usize = 4;

#[tokio::test(flavor = "multi_thread")]
async fn every_cell_of_the_fault_table_is_as_documented() {
    let groups = futures::future::join_all((0..GROUPS).map(run_group));
    let (groups, worker_rows, total_rows) = futures::join!(groups, run_worker_rows(), run_total_rows());
    let rows = groups.into_iter().flatten().chain(worker_rows).chain(total_rows);
    let mut rows: Vec<(usize, Table)> = rows.collect();
    rows.sort_by_key(|(number, _)| *number);
    let seen: String = rows.iter().map(|(_, table)| table.lines.as_str()).collect();
    let seen = format!("{HEAD}{seen}");
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/faults.md");
    if std::env::var_os("UPDATE_DOCS").is_some_and(|value| value == "1") {
        std::fs::write(&file, &seen).unwrap();
    }
    let committed = std::fs::read_to_string(&file).unwrap_or_default();
    let violations: Vec<&String> = rows.iter().flat_map(|(_, table)| &table.violations).collect();
    assert!(violations.is_empty(), "{violations:#?}");
    let differs =
        |(seen, written): (&str, &str)| (seen != written).then(|| format!("seen    {seen}\nwritten {written}"));
    let unexplained: Vec<String> = seen.lines().zip(committed.lines()).filter_map(differs).collect();
    let cells: usize = rows.iter().map(|(_, table)| table.cells).sum();
    println!("fault table: {} faults, {cells} cells, {} unexplained", rows.len(), unexplained.len());
    assert!(unexplained.is_empty(), "docs/faults.md is not what happens:\n{}", unexplained.join("\n"));
    assert_eq!(seen.lines().count(), committed.lines().count());
}

/// What must be so whatever the fault, and is not.
fn violation(row: &Row, outcome: &Outcome) -> Option<String> {
    let Outcome { id, text, attempts, status, complete } = outcome;
    let why = match () {
        () if *status == 0 => "a client is left without an answer",
        () if text.contains("silently") => "nobody can tell that something is missing",
        () if !complete && *status != 200 => "an answer of ours is not whole",
        () if !complete && *attempts > 1 => "an attempt followed one that had reached the client",
        () => return None,
    };
    Some(format!("{id}, {}: {why}: {text}", row.name))
}
