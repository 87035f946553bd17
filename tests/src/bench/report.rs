//! Numbers and how they are shown.

use serde_json::{Value, json};
use std::fmt::Write as _;

/// CPU of one kind of request through each proxy, round by round, µs.
pub struct Case {
    /// What was sent.
    pub name: String,
    /// The budget of turnstile to plain, where there is one.
    pub budget: Option<f64>,
    /// A value for each round, by proxy: plain pingora, turnstile, turnstile without plugins.
    pub rounds: [Vec<f64>; 3],
}

/// One number with its budget.
pub struct Figure {
    /// What it is.
    pub name: String,
    /// The number.
    pub value: f64,
    /// Its unit.
    pub unit: &'static str,
    /// The budget, in words.
    pub budget: &'static str,
}

/// The median; 0 of nothing.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match (values.get(middle), values.len() % 2, middle.checked_sub(1).and_then(|at| values.get(at))) {
        (Some(high), 0, Some(low)) => (high + low) / 2.0,
        (Some(value), ..) => *value,
        (None, ..) => 0.0,
    }
}

impl Case {
    /// Nothing measured yet.
    pub fn new(name: impl Into<String>, budget: Option<f64>) -> Self {
        Self { name: name.into(), budget, rounds: Default::default() }
    }

    fn median_us(&self, proxy: usize) -> f64 {
        median(&mut self.rounds.get(proxy).cloned().unwrap_or_default())
    }

    /// The median of the ratios to plain pingora in the same round.
    fn ratio(&self, proxy: usize) -> f64 {
        let [plain, ..] = &self.rounds;
        let other = self.rounds.get(proxy).map(Vec::as_slice).unwrap_or_default();
        median(&mut other.iter().zip(plain).map(|(other, plain)| other / plain).collect::<Vec<_>>())
    }
}

/// The tables, as text.
pub fn table(cases: &[Case], figures: &[Figure]) -> String {
    let mut text = String::new();
    let _ = writeln!(
        text,
        "{:<44} {:>10} {:>10} {:>7} {:>8} {:>12} {:>7}",
        "CPU of the proxy, us (median of rounds)", "pingora", "turnstile", "ratio", "budget", "no plugins", "ratio"
    );
    for case in cases {
        let budget = case.budget.map_or_else(|| "-".to_owned(), |b| format!("<= {b:.1}"));
        let _ = writeln!(
            text,
            "{:<44} {:>10.2} {:>10.2} {:>7.2} {:>8} {:>12.2} {:>7.2}",
            case.name,
            case.median_us(0),
            case.median_us(1),
            case.ratio(1),
            budget,
            case.median_us(2),
            case.ratio(2)
        );
    }
    let _ = writeln!(text, "\n{:<60} {:>12} {:>6}   budget", "inside", "value", "unit");
    for figure in figures {
        let _ = writeln!(text, "{:<60} {:>12.2} {:>6}   {}", figure.name, figure.value, figure.unit, figure.budget);
    }
    text
}

/// All numbers, every round included.
pub fn json(cases: &[Case], figures: &[Figure]) -> Value {
    let cases: Vec<Value> = cases
        .iter()
        .map(|case| {
            let [plain, turnstile, bare] = &case.rounds;
            json!({
                "name": case.name, "unit": "us", "budget_ratio": case.budget,
                "pingora": plain, "turnstile": turnstile, "turnstile_no_plugins": bare,
                "ratio": case.ratio(1), "ratio_no_plugins": case.ratio(2),
            })
        })
        .collect();
    let figures: Vec<Value> =
        figures.iter().map(|f| json!({"name": f.name, "value": f.value, "unit": f.unit, "budget": f.budget})).collect();
    json!({"requests": cases, "inside": figures})
}
