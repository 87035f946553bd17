//! The log of this process, kept for tests that ask what it says. Tests that share a process share the log, so they look for
//! texts of their own.

use parking_lot::Mutex;
use std::fmt::Debug;
use std::io;
use std::sync::{Arc, OnceLock};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::{Context, SubscriberExt as _};
use tracing_subscriber::{Layer, Registry};

/// Everything logged at level info and above since the first call of [`logs`].
#[derive(Clone, Default)]
pub struct Logs {
    text: Arc<Mutex<Vec<u8>>>,
    plugins: PluginLines,
}

/// What plugins logged, by plugin and in order.
#[derive(Clone, Default)]
struct PluginLines(Arc<Mutex<Vec<(String, String)>>>);

static LOGS: OnceLock<Logs> = OnceLock::new();

/// Starts to keep the log, once.
pub fn logs() -> &'static Logs {
    LOGS.get_or_init(|| {
        let logs = Logs::default();
        let text = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(logs.clone());
        let subscriber = Registry::default().with(text.with_filter(LevelFilter::INFO)).with(logs.plugins.clone());
        // Somebody else's subscriber would keep the lines from us; there is none in these tests.
        tracing_subscriber::util::SubscriberInitExt::try_init(subscriber).expect("the only subscriber");
        logs
    })
}

// === impl Logs ===

impl Logs {
    /// Whether a line holds all these texts.
    pub fn has(&self, texts: &[&str]) -> bool {
        let bytes = self.text.lock();
        String::from_utf8_lossy(&bytes).lines().any(|line| texts.iter().all(|text| line.contains(text)))
    }

    /// The lines that hold all these texts.
    pub fn lines(&self, texts: &[&str]) -> Vec<String> {
        let bytes = self.text.lock();
        let text = String::from_utf8_lossy(&bytes);
        let fits = text.lines().filter(|line| texts.iter().all(|text| line.contains(text)));
        fits.map(str::to_owned).collect()
    }
}

impl Logs {
    /// What plugins logged so far: the plugin's name and the line.
    pub fn plugin_lines(&self) -> Vec<(String, String)> {
        self.plugins.0.lock().clone()
    }
}

// === impl PluginLines ===

impl<S: Subscriber> Layer<S> for PluginLines {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if event.metadata().target() != "turnstile::plugin" {
            return;
        }
        let mut line = Line::default();
        event.record(&mut line);
        self.0.lock().push((line.plugin, line.message));
    }
}

#[derive(Default)]
struct Line {
    plugin: String,
    message: String,
}

impl Visit for Line {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "plugin" {
            self.plugin = value.to_owned();
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.message = format!("{value:?}");
        }
    }
}

impl io::Write for Logs {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.text.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Logs {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}
