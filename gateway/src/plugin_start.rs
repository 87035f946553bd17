//! The plugins of a generation that is being prepared: each module is found and held against its digest, and the plugin is
//! started, or taken over as it runs.

use crate::builtin;
use crate::callouts::{Destinations, PluginPort};
use crate::gateway::STORE;
use crate::generation::{BuildError, Foundation, Generation};
use crate::module_file;
use crate::module_store::digest;
use crate::policy::chain::Exported;
use crate::policy::store::SharedStore;
use crate::policy::{CanaryRun, ChainPlugin, PolicyStore};
use crate::self_test;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use turnstile_config::{Config, Dialect, Isolation, Phase, Plugin as PluginConfig, PluginSource};
use turnstile_plugins::{Callback, Plugin, PluginServices, PluginSpec, SecretHeaders, SharedState};

/// Where modules come from.
pub enum Modules {
    /// From where the configuration says, as they are now.
    Current,
    /// As they were once, by the plugin's name.
    Kept(HashMap<String, Arc<[u8]>>),
}

/// What plugins are started with.
pub struct Start<'a> {
    /// The configuration that they belong to.
    pub config: &'a Config,
    /// What all generations share.
    pub foundation: &'a Foundation,
    /// Generations with plugins that may be taken over.
    pub running: &'a [Arc<Generation>],
    /// Where modules come from.
    pub modules: &'a Modules,
}

impl Start<'_> {
    /// One plugin. Blocks for its module, its compilation and its start.
    ///
    /// # Errors
    /// Why it cannot be part of a generation.
    pub fn plugin(&self, plugin: &PluginConfig) -> Result<ChainPlugin, BuildError> {
        let (name, path) = (plugin.name.clone(), plugin.wasm.to_string());
        let fail = |reason| BuildError::Module { name: name.clone(), path: path.clone(), reason };
        let wasm = self.module(plugin).map_err(fail)?;
        let found = digest(&wasm);
        if let Some(wanted) = plugin.sha256.clone().filter(|wanted| *wanted != found) {
            return Err(BuildError::Digest { name, path, wanted, found });
        }
        let spec = self.spec(plugin, wasm);
        let destinations = Destinations::of(self.config, plugin)?;
        let mut same = self.running.iter().flat_map(|generation| generation.chain.iter()).filter(|c| {
            *c.name == *plugin.name
                && c.digest == found
                && c.plugin.spec().runs_as(&spec)
                && c.destinations == destinations
                && !c.plugin.is_retired()
        });
        let mut canary_before = None;
        let (started, exported) = match same.next() {
            // It goes on counting where it is, so what was exported of its counts comes along.
            Some(running) => {
                canary_before = running.canary.as_ref();
                (running.plugin.clone(), running.exported())
            }
            None => {
                if let Some(refused) = self.foundation.refused.find(&plugin.name, &found, &plugin.given()) {
                    return Err(BuildError::Refused { name, why: refused.why, path, generation: refused.generation });
                }
                // What is kept has served already.
                let test = plugin.self_test.as_ref().filter(|_| matches!(self.modules, Modules::Current));
                if let Some(file) = test {
                    let test = self_test::run(plugin, &spec, &destinations, file, self.config, self.foundation);
                    let file = file.display().to_string();
                    test.map_err(|reason| BuildError::SelfTest { name, file, path: path.clone(), reason })?;
                }
                let (shared, callouts) = (self.foundation.shared.clone(), Arc::clone(&self.foundation.callouts));
                let services = match &self.foundation.services {
                    Some(services) => Arc::clone(services),
                    None => PluginPort::new(shared, callouts, destinations.clone()) as Arc<dyn PluginServices>,
                };
                let started = Plugin::start(&self.foundation.runtime, spec, services);
                (started.map_err(|error| BuildError::Plugin { path: path.clone(), error })?, Exported::default())
            }
        };
        if !plugin.events.is_empty() && !started.exports(Callback::ForeignFunction) {
            return Err(BuildError::Deaf { name: plugin.name.clone(), path });
        }
        let mut member = ChainPlugin::new(plugin, destinations, started, exported, found);
        member.canary = plugin.canary.clone().map(|options| CanaryRun::new(&plugin.name, options, canary_before));
        member.shadow = plugin.shadow.then(|| {
            let space = self.foundation.shared.data.space(&shadow_space(&plugin.name));
            Arc::new(SharedStore(space)) as Arc<dyn PolicyStore>
        });
        Ok(member)
    }

    /// The whole chain.
    ///
    /// # Errors
    /// The first plugin that cannot be part of a generation.
    pub fn chain(&self) -> Result<Vec<ChainPlugin>, BuildError> {
        let mut chain = self.config.plugins.iter().map(|p| self.plugin(p)).collect::<Result<Vec<_>, _>>()?;
        let place =
            |name: &str| self.config.plugins.iter().position(|p| p.canary.as_ref().is_some_and(|c| c.of == name));
        for member in &mut chain {
            member.canary_at = place(&member.name);
        }
        Ok(chain)
    }

    fn module(&self, plugin: &PluginConfig) -> Result<Arc<[u8]>, String> {
        if let Modules::Kept(modules) = self.modules {
            return modules.get(&plugin.name).cloned().ok_or_else(|| "is not kept".to_owned());
        }
        match &plugin.wasm {
            PluginSource::BuiltIn(name) => builtin::module(*name),
            PluginSource::File(path) => module_file::read(path).map(Into::into).map_err(|e| e.to_string()),
            PluginSource::Url(url) => {
                let sha256 = plugin.sha256.as_deref().unwrap_or_default();
                let mut running = self.running.iter().flat_map(|generation| generation.chain.iter());
                match running.find(|c| c.digest == sha256) {
                    Some(running) => Ok(Arc::clone(&running.plugin.spec().wasm)),
                    None => self.foundation.modules.get(url.url(), sha256),
                }
            }
        }
    }

    fn spec(&self, plugin: &PluginConfig, wasm: Arc<[u8]>) -> PluginSpec {
        let configuration = plugin.config.text().into_owned();
        let mut spec = PluginSpec::new(plugin.name.as_str(), wasm).with_configuration(configuration);
        spec.vm_configuration = plugin.vm_configuration.text().into_owned().into_bytes();
        plugin.root_id().clone_into(&mut spec.root_id);
        spec.stub_unknown_imports = plugin.stub_unknown_imports;
        let instances = if plugin.phase == Phase::Background { 1 } else { self.foundation.threads };
        spec.shards = plugin.instances.map_or(instances, |n| n as usize).max(1);
        spec.environment = plugin.environment.clone().into_iter().collect();
        vm_id(plugin).clone_into(&mut spec.vm_id);
        spec.recycle_bytes = plugin.recycle_memory_mib.map(|mib| (mib as usize) << 20);
        spec.dialect = match plugin.dialect {
            Dialect::Standard => turnstile_plugins::Dialect::Standard,
            Dialect::Higress => turnstile_plugins::Dialect::Higress,
        };
        spec.stream_isolation = plugin.isolation == Isolation::Stream;
        spec.limits.callback_deadline_ms = plugin.callback_timeout_ms;
        spec.limits.configure_deadline_ms = plugin.configure_timeout_ms;
        spec.limits.memory_bytes = (plugin.memory_mib as usize) << 20;
        spec.limits.log_lines_per_s = plugin.log_per_s;
        spec.limits.held_body_bytes = plugin.held_body_bytes.as_usize();
        spec.limits.callouts_per_stream = plugin.calls_per_request as usize;
        spec.limits.callouts = plugin.calls as usize;
        spec.limits.callout_body_bytes = plugin.call_body_bytes.as_usize();
        spec.hidden_headers =
            plugin.secret_headers.iter().fold(SecretHeaders::ALL, |hidden, header| hidden.without(header.as_str()));
        spec.allowed_imports.clone_from(&plugin.hostcalls);
        spec
    }
}

/// The name space of a plugin's shared data and queues.
fn vm_id(plugin: &PluginConfig) -> &str {
    match (&plugin.vm_id, plugin.dialect) {
        (Some(vm_id), _) => vm_id,
        // There the plugins of a gateway share one name space: those that belong together meet in it.
        (None, Dialect::Higress) => "",
        (None, Dialect::Standard) => &plugin.name,
    }
}

/// The name space of a shadow's own store.
fn shadow_space(plugin: &str) -> String {
    format!("shadow/{plugin}")
}

/// Forgets what plugins that are in none of these configurations have left in the shared state.
pub fn forget_others(shared: &SharedState, configs: &[Arc<Config>]) {
    let plugins = || configs.iter().flat_map(|config| &config.plugins);
    let names: HashSet<&str> = plugins().map(|plugin| plugin.name.as_str()).collect();
    let vm_ids: HashSet<&str> = plugins().map(vm_id).collect();
    let shadows: HashSet<String> = plugins().filter(|p| p.shadow).map(|p| shadow_space(&p.name)).collect();
    shared.data.retain(|space| space == STORE || vm_ids.contains(space) || shadows.contains(space));
    shared.queues.retain(|vm_id| vm_ids.contains(vm_id));
    shared.metrics.retain(|name| names.contains(name));
}
