//! Calls that plugins make: to upstreams of the configuration and to workers of pools, on pingora's connectors.
//!
//! A plugin asks while it runs; the call is made in a task of its own after the plugin has returned, and the task tells the
//! plugin what came of it.

mod destination;
mod grpc;
mod http;
mod redis;

pub use destination::Destinations;

use crate::fleet_state::Fleet;
use crate::upstream::Upstream;
use destination::Destination;
use grpc::Input;
use hashbrown::HashMap;
use parking_lot::Mutex;
use redis::RedisConnections;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use turnstile_plugins::{CallCommand, CallHandle, CallId, Callout, Fault, GrpcEvent, PluginServices, SharedState};

/// Messages that may wait to be sent on one gRPC stream.
const MAX_WAITING: usize = 1024;
/// Bytes of messages that may wait to be sent on one gRPC stream.
const MAX_QUEUED: usize = 16 << 20;

/// How often a reply looks whether the stream that it is for waits already, and for how long at most. On its way there the
/// stream's task needs some microseconds, unless the machine gives its thread no time.
const MEET_EVERY: Duration = Duration::from_millis(1);
const MEET_LIMIT: Duration = Duration::from_millis(500);

/// The calls of a process.
pub struct Callouts {
    connectors: Upstream,
    redis: RedisConnections,
    runtime: Option<Handle>,
    fleet: watch::Sender<Weak<Fleet>>,
    running: Arc<Mutex<HashMap<CallId, Running>>>,
    tasks: TaskTracker,
    stopped: CancellationToken,
    /// Where nothing can run, as in a check of a configuration, calls stay here until everything ends: one that failed at once
    /// might be made again at once, without an end.
    parked: Mutex<Vec<CallCommand>>,
    turn: AtomicUsize,
}

/// A call under way.
struct Running {
    cancel: CancellationToken,
    /// What the plugin sends on a stream, and how many bytes of it wait.
    input: Option<(mpsc::Sender<Input>, Arc<AtomicUsize>)>,
}

/// What one plugin may use outside of streams.
pub struct PluginPort {
    shared: Arc<SharedState>,
    callouts: Arc<Callouts>,
    destinations: Destinations,
}

// === impl Callouts ===

impl Callouts {
    /// None yet. Calls run on the current runtime; where there is none, none run.
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            connectors: Upstream::default(),
            redis: RedisConnections::default(),
            runtime: Handle::try_current().ok(),
            fleet: watch::Sender::new(Weak::new()),
            running: Arc::default(),
            tasks: TaskTracker::new(),
            stopped: CancellationToken::new(),
            parked: Mutex::default(),
            turn: AtomicUsize::new(0),
        })
    }

    /// The fleet is there: calls to pools, which have waited for it, can be made.
    pub fn attach(&self, fleet: &Arc<Fleet>) {
        self.fleet.send_replace(Arc::downgrade(fleet));
    }

    /// Closes connections that have waited too long for a call.
    pub fn sweep(&self) {
        self.connectors.sweep();
        self.redis.sweep();
    }

    /// Breaks all calls off and waits for their tasks.
    pub async fn stop(&self) {
        self.stopped.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    fn run(self: &Arc<Self>, plugin: &str, command: CallCommand, destinations: &Destinations) {
        let Some(runtime) = &self.runtime else {
            self.parked.lock().push(command);
            return;
        };
        match command {
            CallCommand::Start(handle, callout) => {
                let name = match &*callout {
                    Callout::Http(callout) => &callout.upstream,
                    Callout::Grpc(callout) => &callout.upstream,
                    Callout::Redis(callout) => &callout.upstream,
                };
                let call = Call {
                    callouts: Arc::clone(self),
                    plugin: Arc::from(plugin),
                    destination: destinations.get(name).cloned(),
                };
                self.start(runtime, call, handle, *callout);
            }
            CallCommand::Send { id, message, end } => self.input(id, Input::Message { message, end }),
            CallCommand::Close(id) => self.input(id, Input::End),
            CallCommand::Cancel(id) => {
                if let Some(running) = self.running.lock().remove(&id) {
                    running.cancel.cancel();
                }
            }
        }
    }

    fn start(self: &Arc<Self>, runtime: &Handle, call: Call, handle: CallHandle, callout: Callout) {
        let (id, cancel) = (handle.id(), self.stopped.child_token());
        let (input, inputs) = match &callout {
            Callout::Grpc(callout) if callout.message.is_none() => {
                let (sender, receiver) = mpsc::channel(MAX_WAITING);
                let queued = Arc::new(AtomicUsize::new(0));
                (Some((sender, Arc::clone(&queued))), Some((receiver, queued)))
            }
            _ => (None, None),
        };
        // In the table before the task can end.
        self.running.lock().insert(id, Running { cancel: cancel.clone(), input });
        let running = Arc::clone(&self.running);
        self.tasks.spawn_on(
            async move {
                call.run(handle, callout, inputs, cancel).await;
                running.lock().remove(&id);
            },
            runtime,
        );
    }

    /// A stream that takes nothing while its plugin goes on sending has failed.
    fn input(&self, id: CallId, input: Input) {
        let running = self.running.lock();
        let Some(call) = running.get(&id) else { return };
        let Some((sender, queued)) = &call.input else { return };
        let bytes = input.bytes();
        let queued = queued.fetch_add(bytes, Ordering::Relaxed) + bytes;
        // One that is closed is at its end, and says so itself.
        if queued > MAX_QUEUED || matches!(sender.try_send(input), Err(mpsc::error::TrySendError::Full(_))) {
            call.cancel.cancel();
        }
    }
}

/// One call's task.
struct Call {
    callouts: Arc<Callouts>,
    plugin: Arc<str>,
    destination: Option<Destination>,
}

/// A reply can be faster than the stream's own task on its way from the callback that paused to where it waits, or back there
/// from the reply before. Told then, it could not edit the stream.
async fn meet_owner(handle: &CallHandle) {
    let meeting = async {
        while handle.finds_owner_at_work() {
            tokio::time::sleep(MEET_EVERY).await;
        }
    };
    // One that is still not there is told without.
    let _ = tokio::time::timeout(MEET_LIMIT, meeting).await;
}

/// Tells what happened on a gRPC call. True as long as the guest wants to hear more.
async fn tell(handle: &mut CallHandle, event: GrpcEvent) -> Result<bool, Box<Fault>> {
    meet_owner(handle).await;
    handle.grpc(event)
}

type Inputs = (mpsc::Receiver<Input>, Arc<AtomicUsize>);

impl Call {
    async fn run(self, mut handle: CallHandle, callout: Callout, inputs: Option<Inputs>, cancel: CancellationToken) {
        let Some(destination) = &self.destination else {
            // The plugin was told that it is there when it called.
            return;
        };
        let result = match callout {
            Callout::Http(callout) => {
                let answer = tokio::select! {
                    answer = http::call(&self.callouts, destination, callout) => answer,
                    () = cancel.cancelled() => Err("the call was broken off".to_owned()),
                };
                self.report(if answer.is_ok() { "ok" } else { "failed" });
                meet_owner(&handle).await;
                handle.http(answer)
            }
            Callout::Redis(callout) => {
                // The plugin was told that it is one when it called.
                let Destination::Named(upstream, _) = destination else { return };
                let reply = tokio::select! {
                    reply = redis::call(&self.callouts, &self.plugin, upstream, callout) => reply,
                    () = cancel.cancelled() => Err("the call was broken off".to_owned()),
                };
                self.report(if reply.is_ok() { "ok" } else { "failed" });
                if let Err(reason) = &reply {
                    tracing::debug!(plugin = %self.plugin, upstream = upstream.name, reason, "Redis call failed");
                }
                meet_owner(&handle).await;
                handle.redis(reply)
            }
            Callout::Grpc(callout) => {
                let ended = tokio::select! {
                    ended = grpc::call(&self.callouts, destination, callout, inputs, &mut handle) => ended,
                    () = cancel.cancelled() => Ok(Some((grpc::CANCELLED, "the call was broken off".to_owned()))),
                };
                match ended {
                    Ok(None) => {
                        self.report("ok");
                        Ok(())
                    }
                    Ok(Some((status, message))) => {
                        self.report(if status == 0 { "ok" } else { "failed" });
                        tell(&mut handle, GrpcEvent::Close { status, message }).await.map(|_| ())
                    }
                    Err(fault) => Err(fault),
                }
            }
        };
        if let Err(fault) = result {
            failed(&fault);
        }
    }

    fn report(&self, result: &'static str) {
        if let (Some(fleet), Some(destination)) = (self.callouts.fleet.borrow().upgrade(), &self.destination) {
            fleet.metrics.plugin_callouts.with_label_values(&[&*self.plugin, destination.name(), result]).inc();
        }
    }
}

fn failed(fault: &Fault) {
    tracing::warn!(plugin = %fault.plugin, kind = %fault.kind, message = %fault.message, "plugin failed in a reply");
}

// === impl PluginPort ===

impl PluginPort {
    /// What a plugin that may call `destinations` may use.
    pub fn new(shared: Arc<SharedState>, callouts: Arc<Callouts>, destinations: Destinations) -> Arc<Self> {
        Arc::new(Self { shared, callouts, destinations })
    }
}

impl PluginServices for PluginPort {
    fn shared(&self) -> &SharedState {
        &self.shared
    }

    fn has_upstream(&self, _: &str, upstream: &str) -> bool {
        self.destinations.has(upstream)
    }

    fn has_redis(&self, _: &str, upstream: &str) -> bool {
        self.destinations.has_redis(upstream)
    }

    fn call_out(&self, plugin: &str, command: CallCommand) {
        self.callouts.run(plugin, command, &self.destinations);
    }
}
