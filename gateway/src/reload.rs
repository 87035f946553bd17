//! Reload: a new generation is read, compiled and started aside, then swapped in at once. A bad one changes nothing.

use crate::clock::now_ms;
use crate::gateway::Gateway;
use crate::generation::{Generation, Prepared, prepare};
use crate::plugin_start::{Modules, forget_others};
use crate::probation::release_all;
use crate::ticks::Ticks;
use notify::event::{AccessKind, AccessMode, ModifyKind};
use notify::{EventKind, RecursiveMode, Watcher};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use turnstile_config::{Config, NamedUpstream, PluginSource, Pool, restart_needed};

/// Events come in bursts: an editor writes, renames, sets times.
const SETTLE: Duration = Duration::from_millis(50);
/// For file systems that tell nothing.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Where the configuration comes from, and what the command line said.
#[derive(Debug, Clone)]
pub struct Source {
    /// The file; nothing when the command line named workers.
    pub path: Option<PathBuf>,
    /// The configuration when there is no file.
    pub fixed: Option<Config>,
    /// `--listen`.
    pub listen: Option<std::net::SocketAddr>,
    /// `--admin`: an address, or off.
    pub admin: Option<Option<std::net::SocketAddr>>,
    /// `--explain-headers`.
    pub explain_headers: bool,
}

impl Source {
    /// Reads the configuration as it is now, with the command line's word above it.
    ///
    /// # Errors
    /// Everything that is wrong with the file, each with its place.
    pub fn read(&self) -> Result<Config, String> {
        let mut config = match (&self.path, &self.fixed) {
            (Some(path), _) => Config::load(path).map_err(|e| e.to_string())?,
            (None, Some(config)) => config.clone(),
            (None, None) => return Err("there is no configuration".into()),
        };
        if let (Some(address), Some(first)) = (self.listen, config.listeners.first_mut()) {
            first.address = address;
            config.listeners.truncate(1);
        }
        if let Some(admin) = self.admin {
            config.admin.address = admin;
        }
        config.logging.explain_headers |= self.explain_headers;
        Ok(config)
    }
}

/// What a reload did.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Reloaded {
    /// The generation that serves now.
    pub generation: u64,
    /// Whether it is a new one.
    pub changed: bool,
    /// Keys that changed and take effect only after a restart.
    pub restart_needed: Vec<String>,
}

/// Reloads because somebody asked for it: a configuration that was rolled back comes back.
///
/// # Errors
/// Why nothing changed.
pub async fn reload(gateway: &Arc<Gateway>, ticks: &Arc<Ticks>, source: &Source) -> Result<Reloaded, String> {
    let _one_at_a_time = gateway.reloading.lock().await;
    gateway.history.release();
    reload_now(gateway, ticks, source).await
}

/// Reloads because a file has changed: not as long as the files are as they were at a rollback.
async fn follow(gateway: &Arc<Gateway>, ticks: &Arc<Ticks>, source: &Source) {
    let _one_at_a_time = gateway.reloading.lock().await;
    if let Some(held) = gateway.history.held() {
        let files = held.files.clone();
        let now = tokio::task::spawn_blocking(move || fingerprint(&files)).await.unwrap_or_default();
        if now == held.fingerprint {
            gateway.metrics.reloads.with_label_values(&["held"]).inc();
            return;
        }
        gateway.history.release();
    }
    let _ = reload_now(gateway, ticks, source).await;
}

async fn reload_now(gateway: &Arc<Gateway>, ticks: &Arc<Ticks>, source: &Source) -> Result<Reloaded, String> {
    let result = try_reload(gateway, ticks, source).await;
    match &result {
        Ok(done) if done.changed => {
            gateway.metrics.reloads.with_label_values(&["ok"]).inc();
            *gateway.last_error.lock() = None;
            tracing::info!(generation = done.generation, "new generation serves");
            for key in &done.restart_needed {
                tracing::warn!(key, "takes effect after a restart only");
            }
            for warning in gateway.generation.load().config.warnings() {
                tracing::warn!("{warning}");
            }
        }
        Ok(_) => {
            gateway.metrics.reloads.with_label_values(&["unchanged"]).inc();
            *gateway.last_error.lock() = None;
        }
        Err(reason) => {
            gateway.metrics.reloads.with_label_values(&["failed"]).inc();
            *gateway.last_error.lock() = Some(reason.clone());
            tracing::error!(%reason, "reload failed: the generation before goes on");
        }
    }
    result
}

async fn try_reload(gateway: &Arc<Gateway>, ticks: &Arc<Ticks>, source: &Source) -> Result<Reloaded, String> {
    let previous = gateway.generation.load_full();
    let source = source.clone();
    let gateway_of_task = Arc::clone(gateway);
    // Reading, compiling and configuring block.
    let prepared = tokio::task::spawn_blocking(move || {
        let config = source.read()?;
        let running = [gateway_of_task.generation.load_full()];
        prepare(config, &gateway_of_task.foundation, &running, &Modules::Current).map_err(|e| e.to_string())
    })
    .await
    .map_err(|e| format!("the reload task ended: {e}"))??;
    if prepared.is_same_as(&previous) {
        release_all(&previous);
        return Ok(Reloaded { generation: previous.number, changed: false, restart_needed: Vec::new() });
    }
    let generation = put_in_place(gateway, ticks, prepared, previous.number + 1);
    let restart_needed = restart_needed(&previous.config, &generation.config);
    gateway.probation.begin(&previous, &generation, now_ms());
    gateway.history.served(&previous);
    release_all(&generation);
    Ok(Reloaded { generation: generation.number, changed: true, restart_needed })
}

/// Puts a generation in place: from here on it serves new requests.
pub(crate) fn put_in_place(
    gateway: &Arc<Gateway>,
    ticks: &Arc<Ticks>,
    prepared: Prepared,
    number: u64,
) -> Arc<Generation> {
    // A plugin ends when no generation has it: those that were taken over stay with their old ones until the new one counts.
    let _taken_from = prepared.taken_from();
    // What the plugins that go have counted would be lost with them.
    let previous = gateway.generation.load_full();
    for plugin in previous.chain.iter() {
        plugin.export(&gateway.metrics);
    }
    let generation = Arc::new(prepared.commit(number, &gateway.foundation, &gateway.fleet));
    ticks.adopt(&generation);
    gateway.metrics.generation.set(i64::try_from(generation.number).unwrap_or(i64::MAX));
    gateway.generation.store(Arc::clone(&generation));
    // What plugins share stays for all that still serve or may come back.
    let mut configs = gateway.history.configs();
    configs.extend(gateway.probation.kept().map(|kept| Arc::clone(&kept.config)));
    configs.extend([&previous, &generation].map(|one| Arc::clone(&one.config)));
    forget_others(&gateway.foundation.shared, &configs);
    generation
}

/// Files whose change means a reload.
pub(crate) fn watched(path: &Path, config: &Config) -> BTreeSet<PathBuf> {
    let mut files = BTreeSet::from([path.to_path_buf()]);
    for plugin in &config.plugins {
        if let PluginSource::File(path) = &plugin.wasm {
            files.insert(path.clone());
        }
        files.extend(plugin.self_test.clone());
    }
    let tls = config.pools.iter().map(Pool::tls_options).chain(config.upstreams.iter().map(NamedUpstream::tls_options));
    for options in tls {
        files.extend(options.files().map(|(_, path)| path.to_path_buf()));
    }
    files
}

/// What the files hold: a change of it is a change, whatever the file system says.
pub(crate) fn fingerprint(files: &BTreeSet<PathBuf>) -> Vec<u8> {
    let mut hash = Sha256::new();
    for file in files {
        hash.update(file.as_os_str().as_encoded_bytes());
        match crate::module_file::read(file) {
            Ok(bytes) => hash.update(Sha256::digest(&bytes)),
            Err(error) => hash.update(error.kind().to_string().as_bytes()),
        }
    }
    hash.finalize().to_vec()
}

/// Watches the configuration and the plugins' files, and reloads when one of them changes. Runs until it is dropped.
pub async fn watch(gateway: Arc<Gateway>, ticks: Arc<Ticks>, source: Source) {
    let Some(path) = source.path.clone() else { return std::future::pending().await };
    let (sender, mut events) = mpsc::channel::<()>(1);
    let names = Arc::new(Mutex::new(BTreeSet::new()));
    let names_of_watcher = Arc::clone(&names);
    let notify = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        if event.is_ok_and(|event| is_idle(&event, &names_of_watcher.lock())) {
            return;
        }
        // A full channel already says that something changed.
        let _ = sender.try_send(());
    });
    let mut watcher = match notify {
        Ok(watcher) => Some(watcher),
        Err(error) => {
            tracing::warn!(%error, "file watch unavailable: files are looked at every 5 s");
            None
        }
    };
    let mut directories = BTreeSet::new();
    let mut seen = Vec::new();
    loop {
        let mut files = watched(&path, &gateway.generation.load().config);
        files.extend(gateway.history.held().into_iter().flat_map(|held| held.files));
        for directory in files.iter().filter_map(|f| f.parent()).map(existing) {
            if directories.insert(directory.clone())
                && let Some(watcher) = &mut watcher
                && let Err(error) = watcher.watch(&directory, RecursiveMode::NonRecursive)
            {
                tracing::warn!(directory = %directory.display(), %error, "cannot watch");
            }
        }
        *names.lock() = files.iter().filter_map(|f| f.file_name()).map(OsStr::to_owned).collect();
        let now = tokio::task::spawn_blocking(move || fingerprint(&files)).await.unwrap_or_default();
        // On the first look nothing is known of what the files held when they were read, so they are read once more: a change
        // from before the watch would go unseen for ever.
        if now != seen {
            seen = now;
            follow(&gateway, &ticks, &source).await;
            continue;
        }
        tokio::select! {
            Some(()) = events.recv() => {}
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
        tokio::time::sleep(SETTLE).await;
        while events.try_recv().is_ok() {}
    }
}

/// True for an event that cannot mean a change of the watched files: somebody reads (as we do, after each event), or writes
/// into another file of the directory, such as a log. Renames and links always count, whatever their names.
fn is_idle(event: &notify::Event, names: &BTreeSet<OsString>) -> bool {
    let ours = || event.paths.iter().any(|path| path.file_name().is_none_or(|name| names.contains(name)));
    match event.kind {
        EventKind::Access(AccessKind::Close(AccessMode::Write)) | EventKind::Modify(ModifyKind::Data(_)) => !ours(),
        EventKind::Access(_) => true,
        _ => false,
    }
}

fn existing(directory: &Path) -> PathBuf {
    if directory.as_os_str().is_empty() { PathBuf::from(".") } else { directory.to_path_buf() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use notify::event::{CreateKind, DataChange, RenameMode};

    #[test]
    fn reading_and_other_files_are_no_change() {
        let names = BTreeSet::from([OsString::from("turnstile.toml")]);
        let idle = |kind, path: &str| is_idle(&notify::Event::new(kind).add_path(PathBuf::from(path)), &names);
        let written = EventKind::Modify(ModifyKind::Data(DataChange::Any));
        let closed = |mode| EventKind::Access(AccessKind::Close(mode));
        assert!(idle(closed(AccessMode::Read), "/etc/t/turnstile.toml"), "we read it ourselves after each event");
        assert!(idle(EventKind::Access(AccessKind::Open(AccessMode::Any)), "/etc/t/turnstile.toml"));
        assert!(idle(written, "/etc/t/access.log"));
        assert!(!idle(written, "./turnstile.toml"));
        assert!(!idle(closed(AccessMode::Write), "turnstile.toml"));
        // A mounted directory is changed by swapping a link with a name of its own.
        assert!(!idle(EventKind::Modify(ModifyKind::Name(RenameMode::To)), "/etc/t/..data"));
        assert!(!idle(EventKind::Create(CreateKind::File), "/etc/t/turnstile.toml.new"));
    }
}
