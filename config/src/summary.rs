//! What will run, in words.

use std::fmt::Write;

use crate::{AccessLog, Config, Pool};

/// SGLang closes an idle connection after so many milliseconds (`SGLANG_TIMEOUT_KEEP_ALIVE`).
const SGLANG_KEEP_ALIVE_MS: u64 = 5_000;

// === impl Config ===

impl Config {
    /// What will run, in lines for people, without secrets. `turnstile check` prints it.
    pub fn summary(&self) -> String {
        let mut text = String::new();
        // Writing to a `String` cannot fail.
        let _ = self.write_summary(&mut text);
        text
    }

    /// What is allowed and probably not meant, each a sentence.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.timeouts.upstream_idle_ms >= SGLANG_KEEP_ALIVE_MS {
            warnings.push(format!(
                "timeouts.upstream_idle_ms is {}, and SGLang closes idle connections after {SGLANG_KEEP_ALIVE_MS} ms \
                 unless SGLANG_TIMEOUT_KEEP_ALIVE says more: requests will meet connections that are closing",
                self.timeouts.upstream_idle_ms
            ));
        }
        if self.sessions.busy_wait_ms > self.timeouts.total_s.saturating_mul(1_000) {
            warnings
                .push("sessions.busy_wait_ms is longer than timeouts.total_s, which ends the request first".to_owned());
        }
        if self.admission.max_wait_ms > self.timeouts.total_s.saturating_mul(1_000) {
            warnings
                .push("admission.max_wait_ms is longer than timeouts.total_s, which ends the request first".to_owned());
        }
        for upstream in self.upstreams.iter().filter(|u| u.url.tls() && !u.verify) {
            warnings.push(format!(
                "the certificate of the upstream {} is NOT verified (verify = false): whoever is on the way can read and answer \
                 its calls; trust its certificate with ca_file instead",
                upstream.name
            ));
        }
        if self.plugins.is_empty() {
            warnings.push("plugins is empty: the native defaults decide, and session hints bind nothing".to_owned());
        }
        warnings
    }

    fn write_summary(&self, text: &mut String) -> std::fmt::Result {
        for listener in &self.listeners {
            let protocols = if listener.h2c { "HTTP/1.1, h2c" } else { "HTTP/1.1" };
            writeln!(text, "listener  {} ({protocols})", listener.address)?;
        }
        match self.admin.address {
            Some(address) => {
                let access = if self.admin.token.is_some() { "bearer token" } else { "no token" };
                writeln!(text, "admin     {address} ({access})")?;
            }
            None => writeln!(text, "admin     off")?,
        }
        for pool in &self.pools {
            self.write_pool(pool, text)?;
        }
        for plugin in &self.plugins {
            writeln!(
                text,
                "plugin    {} ({}, phase {}, on error {}, {} ms a call, {} MiB)",
                plugin.name,
                plugin.wasm,
                plugin.phase,
                plugin.on_error(),
                plugin.callback_timeout_ms,
                plugin.memory_mib
            )?;
        }
        if self.plugins.is_empty() {
            writeln!(text, "plugin    none")?;
        }
        for upstream in &self.upstreams {
            let protocol = if upstream.h2c { ", h2c" } else { "" };
            let used: Vec<&str> =
                self.plugins.iter().filter(|p| p.upstreams.contains(&upstream.name)).map(|p| &*p.name).collect();
            let used = if used.is_empty() { "no plugin".to_owned() } else { used.join(", ") };
            writeln!(text, "upstream  {} ({}{protocol}, for {used})", upstream.name, upstream.url)?;
        }
        writeln!(
            text,
            "queue     {} requests, {} of bodies, {} ms; then {}",
            self.admission.max_queue,
            self.admission.max_queue_bytes,
            self.admission.max_wait_ms,
            self.admission.overload_status.code()
        )?;
        writeln!(
            text,
            "sessions  {} at a time, {} s idle, at most {} s; tag {}, stream {}",
            self.sessions.max_sessions,
            self.sessions.default_timeout_s,
            self.sessions.max_timeout_s,
            on_off(self.sessions.tag),
            on_off(self.sessions.stream)
        )?;
        if self.prefill.enabled {
            let (per_worker, most) = (self.prefill.per_worker, self.prefill.max_body_bytes);
            writeln!(text, "prefill   {per_worker} at a time on a worker, bodies to {most}")?;
        } else {
            writeln!(text, "prefill   off")?;
        }
        writeln!(text, "bodies    to {}", self.limits.body_bytes)?;
        let access: String = match &self.logging.access {
            AccessLog::File(path) => path.display().to_string(),
            other => other.clone().into(),
        };
        writeln!(text, "logs      {}, access log to {access}", self.logging.level.as_str())?;
        if let Some(path) = &self.logging.record {
            let (most, files) = (self.logging.record_bytes, self.logging.record_files);
            writeln!(text, "recording {}, {files} files of {most}", path.display())?;
        }
        self.warnings().iter().try_for_each(|warning| writeln!(text, "warning   {warning}"))
    }

    fn write_pool(&self, pool: &Pool, text: &mut String) -> std::fmt::Result {
        let models = if pool.takes_any_model() { "any model".to_owned() } else { pool.models.join(", ") };
        let protocol = if pool.h2c { "h2c" } else { "HTTP/1.1" };
        writeln!(text, "pool      {} ({models}; {protocol})", pool.name)?;
        for worker in &pool.workers {
            let key = if pool.api_key_for(worker).is_some() { ", API key" } else { "" };
            let limit = worker.max_in_flight.or(pool.max_in_flight).or(self.admission.max_in_flight_per_worker);
            let limit = limit.map_or_else(|| "as it reports".to_owned(), |limit| limit.to_string());
            write!(text, "  worker  {} ({}, in flight {limit}{key}", worker.id, worker.url)?;
            worker.labels.iter().try_for_each(|(name, value)| write!(text, ", {name}={value}"))?;
            writeln!(text, ")")?;
        }
        Ok(())
    }
}

fn on_off(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}
