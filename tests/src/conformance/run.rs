//! Runs the kit, or part of it, and says what came of it.

use super::case::{BEHAVIOURS, Case, Mode, load};
use super::guests::Guests;
use super::{gateway, host};
use futures::StreamExt;
use futures::stream;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

/// Tests that run at a time: they wait for each other's work more than they compute.
const AT_A_TIME: usize = 4;

/// The tests and the modules they run.
pub struct Kit {
    cases: Vec<Arc<Case>>,
    guests: Arc<Guests>,
}

/// Which tests to run.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Against what; empty: both.
    pub modes: Vec<Mode>,
    /// Numbers of behaviours; empty: all.
    pub numbers: BTreeSet<u16>,
    /// A part of the tests' names; empty: all.
    pub name: String,
}

/// What came of one test in one mode.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Number of the behaviour.
    pub number: u16,
    /// The test's name.
    pub name: String,
    /// The behaviour.
    pub behaviour: String,
    /// Against what it ran.
    pub mode: Mode,
    /// What was wrong; nothing if it passed.
    pub problem: Option<String>,
    /// What was measured.
    pub measured: Option<String>,
    /// How long it took.
    pub took: Duration,
}

/// What came of a run.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Tests that passed, each mode by itself.
    pub passed: usize,
    /// Tests that failed, each mode by itself.
    pub failed: usize,
    /// Behaviours that no test is about.
    pub untested: Vec<u16>,
}

// === impl Kit ===

impl Kit {
    /// The kit of a directory.
    ///
    /// # Errors
    /// Text that names the file and what is wrong with it.
    pub fn open(dir: &Path, built: Option<PathBuf>) -> Result<Self, String> {
        let cases = load(&dir.join("tests"))?;
        Ok(Self { cases: cases.into_iter().map(Arc::new).collect(), guests: Arc::new(Guests::new(dir.into(), built)) })
    }

    /// The kit of this repository.
    ///
    /// # Errors
    /// As [`Kit::open`].
    pub fn own() -> Result<Self, String> {
        Self::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../conformance"), None)
    }

    /// All tests.
    pub fn cases(&self) -> &[Arc<Case>] {
        &self.cases
    }

    /// Runs the selected tests and tells `each` outcome, in the order of the tests.
    pub async fn run(&self, selection: &Selection, mut each: impl FnMut(&Outcome)) -> Summary {
        let modes = if selection.modes.is_empty() { Mode::ALL.to_vec() } else { selection.modes.clone() };
        let selected = self.cases.iter().filter(|case| {
            (selection.numbers.is_empty() || selection.numbers.contains(&case.number))
                && case.name.contains(&selection.name)
        });
        let runs = selected.flat_map(|case| {
            let on = modes.iter().filter(|mode| case.runs_on.contains(mode));
            on.map(|mode| one(Arc::clone(case), *mode, Arc::clone(&self.guests))).collect::<Vec<_>>()
        });
        let mut outcomes = stream::iter(runs).buffered(AT_A_TIME);
        let (mut passed, mut failed) = (0, 0);
        while let Some(outcome) = outcomes.next().await {
            match outcome.problem {
                None => passed += 1,
                Some(_) => failed += 1,
            }
            each(&outcome);
        }
        Summary { passed, failed, untested: self.untested() }
    }

    /// Behaviours that no test is about.
    pub fn untested(&self) -> Vec<u16> {
        let tested: BTreeSet<u16> = self.cases.iter().map(|case| case.number).collect();
        (1..=BEHAVIOURS).filter(|number| !tested.contains(number)).collect()
    }
}

/// One test in one mode, on a thread of its own: what it breaks, it breaks for itself.
async fn one(case: Arc<Case>, mode: Mode, guests: Arc<Guests>) -> Outcome {
    let began = Instant::now();
    let running = Arc::clone(&case);
    let runtime = Handle::current();
    let ran = tokio::task::spawn_blocking(move || match mode {
        Mode::Host => host::run(&running, &guests),
        Mode::Gateway => runtime.block_on(gateway::run(&running, &guests)).map(|()| None),
    });
    let ran = ran.await;
    let (measured, problem) = match ran {
        Ok(Ok(measured)) => (measured, None),
        Ok(Err(problem)) => (None, Some(problem)),
        Err(error) => (
            None,
            Some(match error.try_into_panic() {
                Ok(panic) => {
                    let text = panic.downcast_ref::<String>().cloned();
                    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
                    format!("panicked: {}", text.unwrap_or_default())
                }
                Err(error) => error.to_string(),
            }),
        ),
    };
    Outcome {
        number: case.number,
        name: case.name.clone(),
        behaviour: case.behaviour.clone(),
        mode,
        problem,
        measured,
        took: began.elapsed(),
    }
}

// === impl Outcome, Summary ===

impl Outcome {
    /// One line, and more about a failure.
    pub fn line(&self) -> String {
        let Self { number, mode, name, behaviour, .. } = self;
        let verdict = if self.problem.is_some() { "FAILED" } else { "ok" };
        let head = format!("{verdict:<7}{number:>3} {:<8}{name}: {behaviour}", mode.name());
        match self.problem.as_ref().or(self.measured.as_ref()) {
            Some(more) => format!("{head}\n  {more}"),
            None => head,
        }
    }

    /// The outcome as JSON.
    pub fn json(&self) -> Value {
        json!({
            "number": self.number,
            "name": self.name,
            "behaviour": self.behaviour,
            "mode": self.mode.name(),
            "passed": self.problem.is_none(),
            "problem": self.problem,
            "measured": self.measured,
            "milliseconds": u64::try_from(self.took.as_millis()).unwrap_or(u64::MAX),
        })
    }
}

impl Summary {
    /// Whether everything selected has passed.
    pub fn is_good(&self) -> bool {
        self.failed == 0
    }
}
