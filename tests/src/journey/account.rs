//! What is printed: a line for every step, with what was seen.

use super::agents::Traffic;
use std::time::Instant;

/// Steps so far.
pub struct Account {
    language: &'static str,
    /// When the step at hand began.
    began: Instant,
    steps: usize,
    arrived: usize,
    traffic: Traffic,
    failed: Vec<String>,
}

impl Default for Account {
    fn default() -> Self {
        let (language, began) = ("", Instant::now());
        Self { language, began, steps: 0, arrived: 0, traffic: Traffic::default(), failed: Vec::new() }
    }
}

impl Account {
    /// The steps that follow are those of a policy in this language.
    pub fn language(&mut self, name: &'static str) {
        self.language = name;
    }

    /// A step: what was seen, or why it failed.
    pub fn step<T>(&mut self, step: &str, seen: Result<(String, T), String>) -> Option<T> {
        self.steps += 1;
        let language = self.language;
        let seconds = std::mem::replace(&mut self.began, Instant::now()).elapsed().as_secs_f64();
        match seen {
            Ok((seen, value)) => {
                println!("ok      {language:<5} {step:<9} {seen} ({seconds:.0} s)");
                Some(value)
            }
            Err(reason) => {
                println!("FAILED  {language:<5} {step:<9} {reason} ({seconds:.0} s)");
                self.failed.push(format!("{language} {step}: {reason}"));
                None
            }
        }
    }

    /// A policy came to production and back.
    pub fn travelled(&mut self, traffic: Traffic) {
        self.arrived += 1;
        self.traffic.add(&traffic);
    }

    /// The closing count. Returns what failed.
    pub fn close(self) -> Vec<String> {
        let Traffic { turns, sessions, events } = self.traffic;
        let meanwhile = match turns {
            0 => String::new(),
            _ => format!(
                "; meanwhile {turns} streaming turns of {sessions} conversations, {events} events: 0 failed, 0 altered"
            ),
        };
        let (arrived, steps, failed) = (self.arrived, self.steps, self.failed.len());
        println!(
            "{arrived} policies from an empty folder to production and back: {steps} steps, {failed} failed{meanwhile}"
        );
        self.failed
    }
}
