//! The log of this process, kept for tests that ask what it says. Tests that share a process share the log, so they look for
//! texts of their own.

use parking_lot::Mutex;
use std::io;
use std::sync::{Arc, OnceLock};
use tracing_subscriber::fmt::MakeWriter;

/// Everything logged at level info and above since the first call of [`logs`].
#[derive(Clone, Default)]
pub struct Logs(Arc<Mutex<Vec<u8>>>);

static LOGS: OnceLock<Logs> = OnceLock::new();

/// Starts to keep the log, once.
pub fn logs() -> &'static Logs {
    LOGS.get_or_init(|| {
        let logs = Logs::default();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(logs.clone()).finish();
        // Somebody else's subscriber would keep the lines from us; there is none in these tests.
        tracing_subscriber::util::SubscriberInitExt::try_init(subscriber).expect("the only subscriber");
        logs
    })
}

// === impl Logs ===

impl Logs {
    /// Whether a line holds all these texts.
    pub fn has(&self, texts: &[&str]) -> bool {
        let bytes = self.0.lock();
        String::from_utf8_lossy(&bytes).lines().any(|line| texts.iter().all(|text| line.contains(text)))
    }

    /// The lines that hold all these texts.
    pub fn lines(&self, texts: &[&str]) -> Vec<String> {
        let bytes = self.0.lock();
        let text = String::from_utf8_lossy(&bytes);
        let fits = text.lines().filter(|line| texts.iter().all(|text| line.contains(text)));
        fits.map(str::to_owned).collect()
    }
}

impl io::Write for Logs {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
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
