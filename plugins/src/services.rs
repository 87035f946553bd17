//! What plugins share with each other and with the gateway, beyond single streams.

use std::borrow::Cow;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::abi::{LogLevel, Status};
use crate::callout::CallCommand;
use crate::measure::CallbackRun;
use crate::metrics::PluginMetrics;
use crate::shared_data::SharedData;
use crate::shared_queues::SharedQueues;

/// State that all plugins of the process share. Keep one for the life of the process and hand it to every generation:
/// what plugins learned then survives reloads. Cheap to clone; clones are the same state.
#[derive(Clone, Debug, Default)]
pub struct SharedState {
    /// Key-value data.
    pub data: SharedData,
    /// Message queues.
    pub queues: SharedQueues,
    /// Metrics that plugins define.
    pub metrics: PluginMetrics,
}

/// A guest's log line.
#[derive(Clone, Copy, Debug)]
pub struct LogLine<'a> {
    /// The plugin's name.
    pub plugin: &'a str,
    /// Severity.
    pub level: LogLevel,
    /// The line: at most 16 KiB of what the guest wrote, invalid UTF-8 replaced.
    pub message: &'a str,
}

/// What a plugin may use outside of streams.
pub trait PluginServices: Send + Sync {
    /// The process's shared state.
    fn shared(&self) -> &SharedState;

    /// Takes a guest's log line, already rate limited. By default it becomes a `tracing` event.
    fn log(&self, line: LogLine<'_>) {
        let LogLine { plugin, level, message } = line;
        match level {
            LogLevel::Trace => tracing::trace!(target: "turnstile::plugin", plugin, "{message}"),
            LogLevel::Debug => tracing::debug!(target: "turnstile::plugin", plugin, "{message}"),
            LogLevel::Info => tracing::info!(target: "turnstile::plugin", plugin, "{message}"),
            LogLevel::Warn => tracing::warn!(target: "turnstile::plugin", plugin, "{message}"),
            LogLevel::Error | LogLevel::Critical => {
                tracing::error!(target: "turnstile::plugin", plugin, "{message}");
            }
        }
    }

    /// The time that guests are told, nanoseconds since 1970.
    fn wall_clock_ns(&self) -> u64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    }

    /// The time of a clock that never goes back, nanoseconds. `running`: how long the plugin has been there.
    fn monotonic_ns(&self, running: Duration) -> u64 {
        u64::try_from(running.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Fills `target` with random bytes. False if there are none to be had.
    fn fill_random(&self, target: &mut [u8]) -> bool {
        getrandom::fill(target).is_ok()
    }

    /// Lines under this level are not formatted, counted or handed over; guests can ask for it.
    fn log_level(&self, plugin: &str) -> LogLevel {
        let _ = plugin;
        LogLevel::Info
    }

    /// A property read outside of a stream. `plugin_name`, `plugin_root_id` and `plugin_vm_id` are answered by the host.
    fn property(&self, plugin: &str, path: &[u8]) -> Option<Vec<u8>> {
        let _ = (plugin, path);
        None
    }

    /// Whether the plugin may call this upstream. Asked while the guest waits: must not block.
    fn has_upstream(&self, plugin: &str, upstream: &str) -> bool {
        let _ = (plugin, upstream);
        false
    }

    /// Whether the plugin may call this upstream as a Redis server. Asked while the guest waits: must not block.
    fn has_redis(&self, plugin: &str, upstream: &str) -> bool {
        let _ = (plugin, upstream);
        false
    }

    /// Does something about a call, after the guest has returned. Must neither block nor tell the command's handle anything
    /// before it returns; commands about one call come in order. By default calls fail.
    fn call_out(&self, plugin: &str, command: CallCommand) {
        let _ = (plugin, command);
    }

    /// Whether [`PluginServices::ran`] is to be told of callbacks. Asked once, when a plugin starts.
    fn measures(&self) -> bool {
        false
    }

    /// A callback has run, whether it returned or not. Told while the plugin is locked: must neither block nor call it.
    fn ran(&self, run: CallbackRun) {
        let _ = run;
    }

    /// A named function called outside of a stream.
    ///
    /// # Errors
    /// As [`StreamEnv::call_foreign`](crate::StreamEnv::call_foreign).
    fn call_foreign(&self, plugin: &str, name: &str, arguments: &[u8]) -> Result<Cow<'_, [u8]>, Status> {
        let _ = (plugin, name, arguments);
        Err(Status::NotFound)
    }
}

impl PluginServices for SharedState {
    fn shared(&self) -> &SharedState {
        self
    }
}
