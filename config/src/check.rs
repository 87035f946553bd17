//! What the schema cannot say: rules that hold between keys, and between the file and the world around it.

use std::{
    collections::HashMap,
    hash::Hash,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use crate::{
    AccessLog, Config, Dialect, Isolation, OnError, Phase, Plugin, PluginConfiguration, PluginSource, Secret,
    TlsOptions,
    node::{Node, join},
    plugin::MAX_VM_CONFIGURATION,
    problem::Problem,
};

/// Fills in the names of pools, and makes paths start at the directory of the file.
pub(crate) fn complete(config: &mut Config, base_dir: &Path) {
    let absolute = |path: &mut PathBuf| *path = base_dir.join(&*path);
    for (index, pool) in config.pools.iter_mut().enumerate() {
        if pool.name.is_empty() {
            pool.name = if index == 0 { "default".to_owned() } else { format!("pool-{}", index + 1) };
        }
        let keys = pool.workers.iter_mut().filter_map(|worker| worker.api_key.as_mut());
        keys.chain(pool.api_key.as_mut()).for_each(|key| key.resolve_path(base_dir));
        [&mut pool.ca_file, &mut pool.client_cert, &mut pool.client_key].into_iter().flatten().for_each(absolute);
    }
    for upstream in &mut config.upstreams {
        let files = [&mut upstream.ca_file, &mut upstream.client_cert, &mut upstream.client_key];
        files.into_iter().flatten().for_each(absolute);
        if let Some(password) = &mut upstream.password {
            password.resolve_path(base_dir);
        }
    }
    for plugin in &mut config.plugins {
        if let PluginSource::File(path) = &mut plugin.wasm {
            absolute(path);
        }
        if let Some(path) = &mut plugin.self_test {
            absolute(path);
        }
        if let Some(sha256) = &mut plugin.sha256 {
            sha256.make_ascii_lowercase();
        }
    }
    if let Some(token) = &mut config.admin.token {
        token.resolve_path(base_dir);
    }
    if let AccessLog::File(path) = &mut config.logging.access {
        absolute(path);
    }
    if let Some(path) = &mut config.logging.record {
        absolute(path);
    }
    if let Some(dir) = &mut config.state.dir {
        absolute(dir);
    }
}

/// Checks a completed configuration. `root` is the tree that it was made from, element by element.
pub(crate) fn check(config: &Config, root: &Node, problems: &mut Vec<Problem>) {
    let mut checker = Checker { problems };
    checker.listeners(config, At::root(root));
    checker.pools(config, At::root(root).entry("pools"));
    checker.plugins(config, At::root(root).entry("plugins"));
    checker.upstreams(config, At::root(root).entry("upstreams"));
    checker.sessions(config, At::root(root).entry("sessions"));
    checker.ejection(config, At::root(root).entry("ejection"));
    checker.logs(config, &At::root(root).entry("logging"));
    checker.state(config, At::root(root).entry("state"));
}

/// Name space of the store that all policies share.
const OWN_SPACE: &str = "turnstile";

struct Checker<'a> {
    problems: &'a mut Vec<Problem>,
}

/// A key of the file. Where the file does not have it, its place is that of the nearest table around it.
#[derive(Clone)]
struct At<'a> {
    node: Option<&'a Node>,
    nearest: &'a Node,
    key: String,
}

/// Values that must not occur twice, and the key of each.
struct Unique<T> {
    what: &'static str,
    seen: HashMap<T, String>,
}

// === impl Checker ===

impl Checker<'_> {
    fn problem(&mut self, at: &At<'_>, message: impl Into<String>) {
        self.problems.push(Problem::new(at.nearest.place, at.key.as_str(), message));
    }

    fn listeners(&mut self, config: &Config, root: At<'_>) {
        let mut taken: Vec<(SocketAddr, String)> = Vec::new();
        for (index, listener) in config.listeners.iter().enumerate() {
            let at = root.entry("listeners").item(index).entry("address");
            if let Some((_, by)) = taken.iter().find(|(address, _)| collide(*address, listener.address)) {
                self.problem(&at, format!("the address is already taken by {by}"));
            }
            taken.push((listener.address, at.key));
        }
        let admin = root.entry("admin");
        let Some(address) = config.admin.address else { return };
        let at = admin.entry("address");
        if let Some((_, by)) = taken.iter().find(|(taken, _)| collide(*taken, address)) {
            self.problem(&at, format!("the address is already taken by {by}"));
        }
        let token = admin.entry("token");
        match &config.admin.token {
            Some(secret) => self.secret(&token, secret),
            None if token.node.is_none() && !address.ip().is_loopback() && !self.has_problem(&token) => {
                self.problem(&at, "an administrative listener that other machines reach needs admin.token");
            }
            None => {}
        }
    }

    fn pools(&mut self, config: &Config, pools: At<'_>) {
        let (mut names, mut ids, mut urls, mut models) = (
            Unique::new("the name"),
            Unique::new("the worker id"),
            Unique::new("the worker's address"),
            Unique::new("the model"),
        );
        let mut any_model: Option<String> = None;
        for (index, pool) in config.pools.iter().enumerate() {
            let at = pools.item(index);
            names.add(self, &at.entry("name"), &pool.name);
            if let Some(key) = &pool.api_key {
                self.secret(&at.entry("api_key"), key);
            }
            self.tls(&at, pool.tls_options(), pool.workers.iter().any(|worker| worker.url.tls()));
            for (index, model) in pool.models.iter().enumerate() {
                models.add(self, &at.entry("models").item(index), model);
            }
            // A list whose elements were dropped names models all the same.
            let takes_any = pool.takes_any_model() && !self.has_problem(&at.entry("models"));
            match &any_model {
                Some(other) if takes_any => self.problem(
                    &at.entry("models"),
                    format!("{other} takes any model already; name the models of all pools but one"),
                ),
                None if takes_any => any_model = Some(at.key.clone()),
                _ => {}
            }
            for (index, worker) in pool.workers.iter().enumerate() {
                let at = at.entry("workers").item(index);
                let (id, url) = (at.entry("id"), at.entry("url"));
                // The short form has one value for both; so has a table without an id.
                let new = urls.add(self, if url.node.is_some() { &url } else { &at }, &worker.url.authority());
                if new || id.node.is_some() {
                    ids.add(self, if id.node.is_some() { &id } else { &at }, &worker.id);
                }
                if let Some(key) = &worker.api_key {
                    self.secret(&at.entry("api_key"), key);
                }
            }
        }
    }

    fn plugins(&mut self, config: &Config, plugins: At<'_>) {
        // The built-in chain stands in no file.
        if plugins.node.is_none() {
            return;
        }
        let mut names = Unique::new("the name");
        for (index, plugin) in config.plugins.iter().enumerate() {
            let at = plugins.item(index);
            names.add(self, &at.entry("name"), &plugin.name);
            self.plugin(plugin, &at);
            self.trial(config, plugin, &at);
            let mut listed = Unique::new("the name");
            for (index, name) in plugin.upstreams.iter().enumerate() {
                let at = at.entry("upstreams").item(index);
                let known = config.upstreams.iter().map(|u| &u.name).chain(config.pools.iter().map(|p| &p.name));
                if !known.clone().any(|known| known == name) {
                    let problem = Problem::new(
                        at.nearest.place,
                        at.key.as_str(),
                        format!("no upstream or pool is called {name}"),
                    );
                    let like = crate::format::closest(name, known.map(String::as_str));
                    self.problems.push(problem.with_suggestion(like));
                }
                listed.add(self, &at, name);
            }
        }
    }

    fn upstreams(&mut self, config: &Config, upstreams: At<'_>) {
        let mut names = Unique::new("the name");
        for (index, upstream) in config.upstreams.iter().enumerate() {
            let at = upstreams.item(index);
            let name = at.entry("name");
            names.add(self, &name, &upstream.name);
            if config.pools.iter().any(|pool| pool.name == upstream.name) {
                self.problem(&name, format!("a pool is called {} already", upstream.name));
            }
            if upstream.url.tls() && upstream.h2c {
                self.problem(&at.entry("h2c"), "h2c is HTTP/2 without TLS, and the url is https");
            }
            self.tls(&at, upstream.tls_options(), upstream.url.tls());
            let redis = upstream.url.is_redis();
            for (key, given, for_redis) in [
                ("h2c", upstream.h2c, false),
                ("username", upstream.username.is_some(), true),
                ("password", upstream.password.is_some(), true),
            ] {
                if given && redis != for_redis {
                    let kind = if for_redis { "a Redis server, and the url is not redis://" } else { "an HTTP server" };
                    self.problem(&at.entry(key), format!("{key} is for {kind}"));
                }
            }
            match &upstream.password {
                Some(password) => self.secret(&at.entry("password"), password),
                // Without one nobody would log in, and commands would run as the server's default user.
                None if redis && upstream.username.is_some() => {
                    self.problem(&at.entry("username"), "username needs a password".to_owned());
                }
                None => {}
            }
        }
    }

    /// TLS options of the table `at`. `used`: a URL is https.
    fn tls(&mut self, at: &At<'_>, options: TlsOptions<'_>, used: bool) {
        let named = options.server_name.map(|_| "server_name");
        for key in named.into_iter().chain(options.files().map(|(key, _)| key)) {
            if !used {
                self.problem(&at.entry(key), "is for TLS, and no url here is https");
            }
        }
        for (key, path) in options.files() {
            self.file(&at.entry(key), path);
        }
        match (options.client_cert, options.client_key) {
            (Some(_), None) if !self.has_problem(&at.entry("client_key")) => {
                self.problem(&at.entry("client_cert"), "needs its private key: client_key");
            }
            (None, Some(_)) if !self.has_problem(&at.entry("client_cert")) => {
                self.problem(&at.entry("client_key"), "needs the certificate it belongs to: client_cert");
            }
            _ => {}
        }
        if options.ca_file.is_some() && !options.verify {
            self.problem(&at.entry("ca_file"), "nothing is verified by it: verify is false");
        }
    }

    fn plugin(&mut self, plugin: &Plugin, at: &At<'_>) {
        match &plugin.wasm {
            PluginSource::BuiltIn(policy) if policy.phase() != plugin.phase => {
                let message = format!("{} runs in the phase \"{}\"", policy.name(), policy.phase());
                self.problem(&at.entry("phase"), message);
            }
            PluginSource::BuiltIn(_) => {}
            PluginSource::File(path) => self.file(&at.entry("wasm"), path),
            PluginSource::Url(_) if plugin.sha256.is_none() && !self.has_problem(&at.entry("sha256")) => {
                self.problem(&at.entry("wasm"), "a module from a URL needs the sha256 that it must have");
            }
            PluginSource::Url(_) => {}
        }
        if let Some(path) = &plugin.self_test {
            self.file(&at.entry("self_test"), path);
        }
        if plugin.recycle_memory_mib.is_some_and(|soft| soft >= plugin.memory_mib) {
            let message = format!("must be below memory_mib, {}", plugin.memory_mib);
            self.problem(&at.entry("recycle_memory_mib"), message);
        }
        if plugin.phase != Phase::Filter && plugin.dialect == Dialect::Higress {
            self.problem(&at.entry("dialect"), "plugins of Higress are filters; expected the phase \"filter\"");
        }
        if plugin.phase != Phase::Filter && !plugin.response {
            self.problem(&at.entry("response"), "only filters are shown answers, so this means nothing");
        }
        self.virtual_machine(plugin, at);
        if plugin.phase == Phase::Background {
            self.background(plugin, at);
        }
        if plugin.phase == Phase::Filter && plugin.on_error == Some(OnError::Fallback) {
            let message = "the phase \"filter\" has no native default to fall back on; expected \"closed\" or \"open\"";
            self.problem(&at.entry("on_error"), message);
        }
    }

    /// Its name space, its configuration and its environment.
    fn virtual_machine(&mut self, plugin: &Plugin, at: &At<'_>) {
        const MAX_NAME_BYTES: usize = 128;
        const MAX_VALUE_BYTES: usize = 4_096;
        let (key, space) = plugin.vm_id.as_deref().map_or(("name", plugin.name.as_str()), |id| ("vm_id", id));
        if space == OWN_SPACE {
            self.problem(&at.entry(key), format!("{OWN_SPACE} is the name space of the functions turnstile.kv_*"));
        }
        // The schema bounds a string.
        let long = plugin.vm_configuration.text().chars().count() > MAX_VM_CONFIGURATION;
        if long && !matches!(plugin.vm_configuration, PluginConfiguration::Text(_)) {
            let message = format!("must have at most {MAX_VM_CONFIGURATION} characters as JSON");
            self.problem(&at.entry("vm_configuration"), message);
        }
        for (name, value) in &plugin.environment {
            let at = at.entry("environment").entry(name);
            if name.is_empty() || name.len() > MAX_NAME_BYTES || name.contains(['=', '\0']) {
                self.problem(&at, format!("expected a name of 1 to {MAX_NAME_BYTES} bytes without `=` and NUL"));
            }
            if value.len() > MAX_VALUE_BYTES || value.contains('\0') {
                self.problem(&at, format!("expected a value of at most {MAX_VALUE_BYTES} bytes without NUL"));
            }
        }
    }

    /// What makes no sense for a plugin without streams.
    fn background(&mut self, plugin: &Plugin, at: &At<'_>) {
        let given = [
            ("on_error", plugin.on_error.is_some()),
            ("events", !plugin.events.is_empty()),
            ("self_test", plugin.self_test.is_some()),
            ("isolation", plugin.isolation == Isolation::Stream),
            ("shadow", plugin.shadow),
            ("canary", plugin.canary.is_some()),
        ];
        for (key, _) in given.into_iter().filter(|(_, given)| *given) {
            self.problem(
                &at.entry(key),
                "a plugin of the phase \"background\" sees no requests, so this means nothing",
            );
        }
    }

    fn file(&mut self, at: &At<'_>, path: &Path) {
        match std::fs::metadata(path) {
            Ok(found) if found.is_file() => {}
            Ok(_) => self.problem(at, format!("{} is not a file", path.display())),
            Err(error) => self.problem(at, format!("cannot read {}: {error}", path.display())),
        }
    }

    /// Shadows and canaries.
    fn trial(&mut self, config: &Config, plugin: &Plugin, at: &At<'_>) {
        let (shadow, canary) = (at.entry("shadow"), at.entry("canary"));
        if plugin.shadow && plugin.phase == Phase::Filter {
            self.problem(
                &shadow,
                "a filter has no decision that could stay without effect; for the phases admit and route",
            );
        }
        let Some(trial) = plugin.canary.as_ref().filter(|_| plugin.phase != Phase::Background) else { return };
        if plugin.phase == Phase::Filter {
            self.problem(&canary, "the session of a request is not known to filters; for the phases admit and route");
        }
        if plugin.shadow {
            self.problem(&shadow, "a canary decides, a shadow does not: expected one of the two");
        }
        let of = canary.entry("of");
        let same = |other: &&Plugin| other.canary.as_ref().is_some_and(|c| c.of == trial.of);
        match config.plugins.iter().find(|other| other.name == trial.of) {
            None => self.problem(&of, format!("there is no plugin {}", trial.of)),
            Some(other) if other.phase != plugin.phase => {
                let message = format!("{} runs in the phase \"{}\", not \"{}\"", other.name, other.phase, plugin.phase);
                self.problem(&of, message);
            }
            Some(other) if other.shadow || other.canary.is_some() => {
                self.problem(&of, format!("{} is a canary or a shadow itself", other.name));
            }
            Some(_) if config.plugins.iter().find(same).is_some_and(|first| first.name != plugin.name) => {
                self.problem(&of, format!("{} has a canary already", trial.of));
            }
            Some(_) => {}
        }
    }

    fn sessions(&mut self, config: &Config, at: At<'_>) {
        let sessions = &config.sessions;
        let (default, most) = (at.entry("default_timeout_s"), at.entry("max_timeout_s"));
        if sessions.default_timeout_s > sessions.max_timeout_s
            && !self.has_problem(&default)
            && !self.has_problem(&most)
        {
            let message = format!(
                "default_timeout_s is {}, longer than max_timeout_s, {}",
                sessions.default_timeout_s, sessions.max_timeout_s
            );
            self.problem(if default.node.is_some() { &default } else { &most }, message);
        }
        let mut headers = Unique::new("the header");
        for (index, family) in sessions.id_headers.iter().enumerate() {
            let at = at.entry("id_headers").item(index);
            let session = at.entry("session");
            headers.add(self, if session.node.is_some() { &session } else { &at }, &family.session);
        }
    }

    /// Whoever shares a directory by accident would find out too late, so it has to be named.
    fn state(&mut self, config: &Config, at: At<'_>) {
        let interval = at.entry("interval_s");
        if config.state.interval_s > 0 && at.entry("dir").node.is_none() && !self.has_problem(&interval) {
            self.problem(&interval, "snapshots need a directory of their own: state.dir");
        }
    }

    fn ejection(&mut self, config: &Config, at: At<'_>) {
        let ejection = &config.ejection;
        let (base, most) = (at.entry("base_ms"), at.entry("max_ms"));
        if ejection.base_ms > ejection.max_ms && !self.has_problem(&base) && !self.has_problem(&most) {
            let message = format!("base_ms is {}, longer than max_ms, {}", ejection.base_ms, ejection.max_ms);
            self.problem(if base.node.is_some() { &base } else { &most }, message);
        }
    }

    fn logs(&mut self, config: &Config, logging: &At<'_>) {
        let access = match &config.logging.access {
            AccessLog::File(path) => Some(path),
            AccessLog::Stdout | AccessLog::Stderr | AccessLog::Off => None,
        };
        let record = logging.entry("record");
        if access.is_some() && access == config.logging.record.as_ref() {
            self.problem(&record, "is the file of the access log");
        }
        for (at, path) in [(logging.entry("access"), access), (record, config.logging.record.as_ref())] {
            let Some(path) = path else { continue };
            if path.is_dir() {
                self.problem(&at, format!("{} is a directory", path.display()));
            } else if !path.parent().is_some_and(|dir| dir.as_os_str().is_empty() || dir.is_dir()) {
                self.problem(&at, format!("the directory of {} does not exist", path.display()));
            }
        }
    }

    fn secret(&mut self, at: &At<'_>, secret: &Secret) {
        if let Err(error) = secret.resolve() {
            self.problem(at, error.to_string());
        }
    }

    /// Whether a key, or something in it, was dropped: then its default is not what the file meant.
    fn has_problem(&self, at: &At<'_>) -> bool {
        let inside = |rest: &str| rest.is_empty() || rest.starts_with(['.', '[']);
        self.problems.iter().any(|problem| problem.key.strip_prefix(&at.key).is_some_and(inside))
    }
}

/// Whether two sockets cannot listen at a time. Port 0 is any free one.
fn collide(a: SocketAddr, b: SocketAddr) -> bool {
    let same_family = a.is_ipv4() == b.is_ipv4();
    a.port() != 0
        && a.port() == b.port()
        && (a.ip() == b.ip() || same_family && (a.ip().is_unspecified() || b.ip().is_unspecified()))
}

// === impl At ===

impl<'a> At<'a> {
    fn root(root: &'a Node) -> Self {
        Self { node: Some(root), nearest: root, key: String::new() }
    }

    fn entry(&self, name: &str) -> Self {
        self.step(self.node.and_then(|node| node.get(name)), || join(&self.key, name))
    }

    fn item(&self, index: usize) -> Self {
        self.step(self.node.and_then(|node| node.item(index)), || format!("{}[{index}]", self.key))
    }

    fn step(&self, node: Option<&'a Node>, key: impl FnOnce() -> String) -> Self {
        Self { node, nearest: node.unwrap_or(self.nearest), key: node.map_or_else(key, |node| node.key.clone()) }
    }
}

// === impl Unique ===

impl<T: Hash + Eq + Clone + ToString> Unique<T> {
    fn new(what: &'static str) -> Self {
        Self { what, seen: HashMap::new() }
    }

    /// Returns whether the value is new; adds a problem when it is not.
    fn add(&mut self, checker: &mut Checker<'_>, at: &At<'_>, value: &T) -> bool {
        if let Some(first) = self.seen.get(value) {
            let message = format!("{} {} is already used by {first}", self.what, value.to_string());
            checker.problem(at, message);
            return false;
        }
        self.seen.insert(value.clone(), at.key.clone());
        true
    }
}

#[cfg(test)]
#[path = "check_tests.rs"]
mod tests;
