//! The command line of `turnstile replay`.

use super::log::Format;
use clap::Args;
use std::path::PathBuf;

/// `turnstile replay`.
#[derive(Debug, Clone, Args)]
pub struct ReplayArgs {
    /// Recorded turns (logging.record), or a trace; several files are read one after the other, the oldest first
    #[arg(value_name = "LOG", required = true)]
    pub logs: Vec<PathBuf>,
    /// What decides: builtin (the default chain), native (the same without plugins), round-robin, random, least-load, or
    /// a configuration file (.toml) with a chain of its own; repeat it to compare with the first
    #[arg(long = "policy", short, value_name = "POLICY", default_value = "builtin")]
    pub policies: Vec<String>,
    /// Configuration for policies that bring none; pools are not needed
    #[arg(long, short, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// What the files are
    #[arg(long, value_enum, default_value_t = Format::Auto)]
    pub format: Format,
    /// The pool to replay, where the log has several
    #[arg(long, value_name = "NAME")]
    pub pool: Option<String>,
    /// The fleet
    #[command(flatten)]
    pub fleet: FleetArgs,
    /// A turn comes so long after the one before it in its session as in the recording, instead of when it came then
    #[arg(long)]
    pub closed_loop: bool,
    /// Arrivals and pauses so many times as fast
    #[arg(long, default_value_t = 1.0, value_name = "TIMES", value_parser = |text: &str| number(text, 0.01, 1e6))]
    pub speed: f64,
    /// Turns at the beginning that are played and not counted: a share of all (10%) or a time (30s)
    #[arg(long, default_value = "10%", value_name = "SHARE|TIME", value_parser = Warmup::parse)]
    pub warmup: Warmup,
    /// Seed of everything random
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Resamples for the confidence intervals of differences
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub resamples: u32,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
    /// Write a page with tables and plots; it needs no other file
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Write the plots
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// The fleet; what is not given is taken from the log where that tells it.
#[derive(Debug, Clone, Default, Args)]
pub struct FleetArgs {
    /// The fleet in a file (JSON), worker by worker; what it leaves out is what the options below say, or as recorded
    #[arg(long, value_name = "FILE", conflicts_with = "workers")]
    pub fleet: Option<PathBuf>,
    /// Number of workers
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub workers: Option<u32>,
    /// Tokens of the KV pool of one worker
    #[arg(long, value_parser = clap::value_parser!(u64).range(1_000..=1 << 40))]
    pub kv_tokens: Option<u64>,
    /// Requests that one worker runs at a time
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub max_running: Option<u32>,
    /// Turns that one worker is given at a time
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub max_in_flight: Option<u32>,
    /// Prefill rate of one worker, tokens per second
    #[arg(long, value_parser = |text: &str| number(text, 1.0, 1e9))]
    pub prefill_rate: Option<f64>,
    /// A decode step of an empty batch, ms
    #[arg(long, value_name = "MS", value_parser = |text: &str| number(text, 0.001, 1e4))]
    pub decode_ms: Option<f64>,
    /// What each request of the batch adds to a step, ms
    #[arg(long, value_name = "MS", value_parser = |text: &str| number(text, 0.0, 1e3))]
    pub decode_ms_per_running: Option<f64>,
}

/// How much of the beginning is not counted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Warmup {
    /// This share of the turns.
    Share(f64),
    /// Turns that come in the first so many seconds.
    Seconds(f64),
}

impl Warmup {
    fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("expected a share such as 10% (below 100%) or a time such as 30s, found {text:?}");
        let number = |text: &str| text.trim().parse::<f64>().ok().filter(|n| n.is_finite() && *n >= 0.0);
        if let Some(share) = text.strip_suffix('%') {
            return number(share)
                .filter(|share| *share < 100.0)
                .map(|share| Self::Share(share / 100.0))
                .ok_or_else(wrong);
        }
        text.strip_suffix('s').and_then(number).map(Self::Seconds).ok_or_else(wrong)
    }
}

impl std::fmt::Display for Warmup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Share(share) => write!(f, "{}%", share * 100.0),
            Self::Seconds(seconds) => write!(f, "{seconds}s"),
        }
    }
}

fn number(text: &str, least: f64, most: f64) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| (least..=most).contains(number));
    number.ok_or_else(|| format!("expected a number from {least} to {most}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warm_up_is_a_share_or_a_time() {
        assert_eq!(Warmup::parse("10%"), Ok(Warmup::Share(0.1)));
        assert_eq!(Warmup::parse("0%"), Ok(Warmup::Share(0.0)));
        assert_eq!(Warmup::parse("90s"), Ok(Warmup::Seconds(90.0)));
        for wrong in ["", "10", "100%", "-1%", "-1s", "nan%", "infs", "1m"] {
            assert!(Warmup::parse(wrong).is_err(), "{wrong}");
        }
    }
}
