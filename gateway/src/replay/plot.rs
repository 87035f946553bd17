//! The plots of a replay as SVG, and a page around them. Nothing is loaded from anywhere.

use super::report::{Report, Table, ms};
use super::results::TurnResult;
use super::workload::Workload;
use std::fmt::Write;

const WIDTH: f64 = 960.0;
/// Height of one plot with its title and axis.
const PLOT_HEIGHT: f64 = 270.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 40.0;
const LEGEND: f64 = 30.0;
/// Parts of the time for the hit ratio.
const BINS: usize = 48;
/// Points of one distribution.
const POINTS: usize = 200;
/// Colours that people with any colour vision can tell apart.
const COLOURS: [&str; 7] = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"];

/// One policy's turns.
pub struct Series<'a> {
    /// The policy.
    pub name: &'a str,
    /// Its turns.
    pub results: &'a [TurnResult],
}

/// One plot: where it stands and what its axes span.
struct Axes {
    top: f64,
    x: (f64, f64),
    y: (f64, f64),
}

fn colour(place: usize) -> &'static str {
    COLOURS.get(place % COLOURS.len()).copied().unwrap_or("#000000")
}

/// Text in markup.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

impl Axes {
    fn at(&self, x: f64, y: f64) -> (f64, f64) {
        let part = |value: f64, (low, high): (f64, f64)| {
            if high > low { ((value - low) / (high - low)).clamp(0.0, 1.0) } else { 0.0 }
        };
        let width = WIDTH - LEFT - RIGHT;
        let height = PLOT_HEIGHT - TOP - BOTTOM;
        (LEFT + width * part(x, self.x), self.top + TOP + height * (1.0 - part(y, self.y)))
    }

    /// Frame, title and labels: `(value, label)` of each axis.
    fn frame(&self, svg: &mut String, title: &str, xs: &[(f64, String)], ys: &[(f64, String)]) {
        let (left, bottom) = self.at(self.x.0, self.y.0);
        let (right, top) = self.at(self.x.1, self.y.1);
        let _ =
            writeln!(svg, r#"<text x="{left:.1}" y="{:.1}" font-weight="bold">{}</text>"#, top - 14.0, escape(title));
        for (value, label) in ys {
            let (_, y) = self.at(self.x.0, *value);
            let _ = writeln!(
                svg,
                r##"<line x1="{left:.1}" y1="{y:.1}" x2="{right:.1}" y2="{y:.1}" stroke="#ddd"/><text x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"##,
                left - 6.0,
                y + 4.0,
                escape(label)
            );
        }
        for (value, label) in xs {
            let (x, _) = self.at(*value, self.y.0);
            let _ = writeln!(
                svg,
                r##"<line x1="{x:.1}" y1="{bottom:.1}" x2="{x:.1}" y2="{:.1}" stroke="#888"/><text x="{x:.1}" y="{:.1}" text-anchor="middle">{}</text>"##,
                bottom + 4.0,
                bottom + 18.0,
                escape(label)
            );
        }
        let _ = writeln!(
            svg,
            r##"<line x1="{left:.1}" y1="{bottom:.1}" x2="{right:.1}" y2="{bottom:.1}" stroke="#888"/>"##
        );
    }

    fn line(&self, svg: &mut String, points: impl Iterator<Item = (f64, f64)>, colour: &str, dash: &str) {
        let points: Vec<String> = points.map(|(x, y)| self.at(x, y)).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(
            svg,
            r#"<polyline fill="none" stroke="{colour}" stroke-width="1.8"{dash} points="{}"/>"#,
            points.join(" ")
        );
    }
}

/// The plots: hit ratio over time, distribution of TTFT, computed tokens by worker.
pub fn svg(report: &Report, work: &Workload, series: &[Series<'_>], counts: impl Fn(usize) -> bool) -> String {
    let height = LEGEND + 3.0 * PLOT_HEIGHT;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n"
    );
    let mut x = LEFT;
    for (place, one) in series.iter().enumerate() {
        let _ = writeln!(
            svg,
            r#"<rect x="{x:.1}" y="12" width="12" height="12" fill="{}"/><text x="{:.1}" y="22">{}</text>"#,
            colour(place),
            x + 17.0,
            escape(one.name)
        );
        x += 40.0 + 7.0 * one.name.chars().count() as f64;
    }
    hit_ratio(&mut svg, work, series, &counts);
    ttft(&mut svg, series, &counts);
    by_worker(&mut svg, report);
    svg.push_str("</svg>\n");
    svg
}

fn hit_ratio(svg: &mut String, work: &Workload, series: &[Series<'_>], counts: &impl Fn(usize) -> bool) {
    let span_s = (work.span_us() as f64 / 1e6).max(1e-3);
    let axes = Axes { top: LEGEND, x: (0.0, span_s), y: (0.0, 1.0) };
    let ys: Vec<(f64, String)> = (0..=4).map(|n| f64::from(n) / 4.0).map(|y| (y, format!("{y:.2}"))).collect();
    let xs: Vec<(f64, String)> =
        (0..=6).map(|n| span_s * f64::from(n) / 6.0).map(|x| (x, format!("{x:.0} s"))).collect();
    axes.frame(svg, "Hit ratio over time (dashed: a cache without bound)", &xs, &ys);
    let bin_of = |number: usize| {
        let first = work.first_ms;
        let at = work.entry(number).map_or(0.0, |entry| (entry.line.ts - first) as f64 / 1e3);
        ((at / span_s * BINS as f64) as usize).min(BINS - 1)
    };
    let binned = |parts: &dyn Fn(usize) -> Option<(u64, u64)>| {
        let mut sums = [(0_u64, 0_u64); BINS];
        for number in (0..work.turns()).filter(|number| counts(*number)) {
            if let (Some((part, whole)), Some(sum)) = (parts(number), sums.get_mut(bin_of(number))) {
                *sum = (sum.0 + part, sum.1 + whole);
            }
        }
        let points = sums.into_iter().enumerate().filter(|(_, (_, whole))| *whole > 0);
        points
            .map(|(bin, (part, whole))| ((bin as f64 + 0.5) / BINS as f64 * span_s, part as f64 / whole as f64))
            .collect::<Vec<_>>()
    };
    let ideal = binned(&|number| {
        let prompt = work.prompts.list.get(number)?;
        Some((prompt.ideal_cached, work.prompts.sequences.len(prompt.sequence)))
    });
    axes.line(svg, ideal.into_iter(), "#888888", r#" stroke-dasharray="5 4""#);
    for (place, one) in series.iter().enumerate() {
        let served = |number: usize| one.results.get(number).filter(|result| result.first_us.is_some());
        let points = binned(&|number| served(number).map(|result| (result.cached_tokens, result.prompt_tokens)));
        axes.line(svg, points.into_iter(), colour(place), "");
    }
}

fn ttft(svg: &mut String, series: &[Series<'_>], counts: &impl Fn(usize) -> bool) {
    let sorted: Vec<Vec<f64>> = series
        .iter()
        .map(|one| {
            let counted = one.results.iter().enumerate().filter(|(number, _)| counts(*number));
            let mut values: Vec<f64> = counted.filter_map(|(_, result)| result.ttft_ms()).collect();
            values.sort_by(f64::total_cmp);
            values
        })
        .collect();
    let least = sorted.iter().filter_map(|values| values.first()).copied().fold(f64::INFINITY, f64::min);
    let most = sorted.iter().filter_map(|values| values.last()).copied().fold(1.0, f64::max);
    let low = if least.is_finite() { least.max(0.1).log10().floor() } else { 0.0 };
    let high = most.log10().ceil().max(low + 1.0);
    let axes = Axes { top: LEGEND + PLOT_HEIGHT, x: (low, high), y: (0.0, 1.0) };
    let ys: Vec<(f64, String)> = (0..=4).map(|n| f64::from(n) / 4.0).map(|y| (y, format!("{y:.2}"))).collect();
    let decades = (high - low) as usize;
    let xs: Vec<(f64, String)> =
        (0..=decades).map(|n| low + n as f64).map(|x| (x, format!("{} ms", ms(10_f64.powf(x))))).collect();
    axes.frame(svg, "Share of turns whose first token came within a time", &xs, &ys);
    for (place, values) in sorted.iter().enumerate() {
        let count = values.len();
        let points = count.min(POINTS);
        let point = |n: usize| {
            // From the first to the last value.
            let rank = if points > 1 { n * (count - 1) / (points - 1) } else { 0 };
            values.get(rank).map(|value| (value.max(0.1).log10(), (rank + 1) as f64 / count as f64))
        };
        axes.line(svg, (0..points).filter_map(point), colour(place), "");
    }
}

fn by_worker(svg: &mut String, report: &Report) {
    let most = report.policies.iter().flat_map(|summary| &summary.workers).map(|share| share.prefilled_tokens).max();
    let most = most.unwrap_or(0).max(1) as f64;
    let workers = report.replay.workers.len().max(1);
    let axes = Axes { top: LEGEND + 2.0 * PLOT_HEIGHT, x: (0.0, workers as f64), y: (0.0, most) };
    let ys: Vec<(f64, String)> =
        (0..=4).map(|n| most * f64::from(n) / 4.0).map(|y| (y, format!("{:.0}k", y / 1e3))).collect();
    // Beyond some number their names would stand in each other's way.
    let every = workers.div_ceil(12);
    let xs: Vec<(f64, String)> = report
        .replay
        .workers
        .iter()
        .enumerate()
        .filter(|(place, _)| place % every == 0)
        .map(|(place, worker)| (place as f64 + 0.5, worker.id.chars().take(18).collect()))
        .collect();
    axes.frame(svg, "Prompt tokens computed, by worker", &xs, &ys);
    let policies = report.policies.len().max(1) as f64;
    for (place, summary) in report.policies.iter().enumerate() {
        for (worker, share) in summary.workers.iter().enumerate() {
            let begin = worker as f64 + 0.1 + 0.8 * place as f64 / policies;
            let (left, top) = axes.at(begin, share.prefilled_tokens as f64);
            let (right, bottom) = axes.at(begin + 0.8 / policies, 0.0);
            let _ = writeln!(
                svg,
                r#"<rect x="{left:.1}" y="{top:.1}" width="{:.1}" height="{:.1}" fill="{}"/>"#,
                (right - left).max(0.5),
                bottom - top,
                colour(place)
            );
        }
    }
}

/// A page with the tables and the plots.
pub fn html(report: &Report, svg: &str) -> String {
    let table = |table: &Table| {
        let row = |cells: &[String], tag: &str| {
            let cells: Vec<String> = cells.iter().map(|cell| format!("<{tag}>{}</{tag}>", escape(cell))).collect();
            format!("<tr>{}</tr>\n", cells.concat())
        };
        let lines: Vec<String> = table.lines.iter().map(|line| row(line, "td")).collect();
        format!("<table>\n{}{}</table>\n", row(&table.head, "th"), lines.concat())
    };
    let mut body = format!("<h1>Replay</h1>\n<pre>{}</pre>\n", escape(&report.replay.text()));
    body.push_str(&table(&report.summary_table()));
    if let Some(urgency) = report.urgency_table() {
        body.push_str(&table(&urgency));
    }
    if let Some(differences) = report.difference_table() {
        body.push_str(&table(&differences));
        let _ = writeln!(
            body,
            "<p>In brackets: 95 % intervals of a paired bootstrap over conversations, {} resamples.</p>",
            report.replay.resamples
        );
    }
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>turnstile replay</title>\n<style>\n\
         body {{ font: 14px sans-serif; margin: 2em auto; max-width: 70em; }}\n\
         table {{ border-collapse: collapse; margin: 1em 0; }}\n\
         th, td {{ padding: 0.25em 0.6em; text-align: right; border-bottom: 1px solid #ddd; }}\n\
         th:first-child, td:first-child {{ text-align: left; }}\n</style>\n</head>\n<body>\n{body}{svg}</body>\n</html>\n"
    )
}
