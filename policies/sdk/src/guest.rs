//! The glue between the Proxy-Wasm SDK and a policy. Only in WebAssembly builds.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::rc::Rc;

use proxy_wasm::hostcalls;
use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::{Action, BufferType, ContextType, LogLevel, MapType, MetricType};

use crate::{Admit, Counter, Decision, Event, Host, Outcome, Policy, Route, Setup, Turn, parse_options};

/// The host, through the SDK's calls. The SDK itself traps on a status that the ABI does not allow for a call; every
/// status that it does allow ends here as `None` or as nothing done.
struct ProxyWasm;

impl Host for ProxyWasm {
    fn get(&self, path: &[&str]) -> Option<Vec<u8>> {
        hostcalls::get_property(path.to_vec()).ok().flatten()
    }

    fn set(&self, path: &[&str], value: &[u8]) {
        let _ = hostcalls::set_property(path.to_vec(), Some(value));
    }

    fn header(&self, name: &str) -> Option<Vec<u8>> {
        hostcalls::get_map_value_bytes(MapType::HttpRequestHeaders, name).ok().flatten()
    }

    fn call(&self, function: &str, arguments: &[u8]) -> Option<Vec<u8>> {
        hostcalls::call_foreign_function(function, Some(arguments)).ok().flatten()
    }

    fn define_counter(&self, name: &str) -> Counter {
        Counter::from_id(hostcalls::define_metric(MetricType::Counter, name).ok())
    }

    fn count(&self, counter: Counter, by: u32) {
        if let Some(id) = counter.id() {
            let _ = hostcalls::increment_metric(id, i64::from(by));
        }
    }
}

/// Which question a module answers.
pub trait Phase<P>: 'static {
    /// Asks the policy.
    fn decide(policy: &mut P, turn: &Turn<'_>) -> Decision;
}

/// The `admit` phase.
pub struct Admitting;

/// The `route` phase.
pub struct Routing;

impl<P: Admit> Phase<P> for Admitting {
    fn decide(policy: &mut P, turn: &Turn<'_>) -> Decision {
        policy.admit(turn)
    }
}

impl<P: Route> Phase<P> for Routing {
    fn decide(policy: &mut P, turn: &Turn<'_>) -> Decision {
        policy.route(turn)
    }
}

/// Registers the policy with the SDK. Called by the macros from the module's entry point.
pub fn start<F: Phase<P>, P: Policy>() {
    proxy_wasm::set_log_level(LogLevel::Info);
    proxy_wasm::set_root_context(|_| {
        Box::new(Plugin::<F, P> { policy: Rc::new(RefCell::new(None)), phase: PhantomData })
    });
}

/// Empty until configured.
type Shared<P> = Rc<RefCell<Option<P>>>;

struct Plugin<F, P> {
    policy: Shared<P>,
    phase: PhantomData<F>,
}

impl<F: Phase<P>, P: Policy> Context for Plugin<F, P> {}

impl<F: Phase<P>, P: Policy> RootContext for Plugin<F, P> {
    fn on_configure(&mut self, _size: usize) -> bool {
        let configuration = self.get_plugin_configuration().unwrap_or_default();
        let made = parse_options(&configuration)
            .map_err(|error| error.to_string())
            .and_then(|options| P::new(options, &mut Setup::new(&ProxyWasm)));
        match made {
            Ok(policy) => {
                *self.policy.borrow_mut() = Some(policy);
                true
            }
            Err(error) => {
                log::error!("{error}");
                false
            }
        }
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }

    fn create_http_context(&self, _context_id: u32) -> Option<Box<dyn HttpContext>> {
        Some(Box::new(Stream::<F, P> { policy: Rc::clone(&self.policy), phase: PhantomData }))
    }
}

struct Stream<F, P> {
    policy: Shared<P>,
    phase: PhantomData<F>,
}

impl<F: Phase<P>, P: Policy> Context for Stream<F, P> {
    fn on_foreign_function(&mut self, function: u32, size: usize) {
        if function != Event::FUNCTION {
            return;
        }
        let json = hostcalls::get_buffer(BufferType::CallData, 0, size).ok().flatten().unwrap_or_default();
        if let (Some(event), Some(policy)) = (Event::read(&json), self.policy.borrow_mut().as_mut()) {
            policy.on_event(&event, &Turn::new(&ProxyWasm));
        }
    }
}

impl<F: Phase<P>, P: Policy> HttpContext for Stream<F, P> {
    fn on_http_request_headers(&mut self, _headers: usize, _end_of_stream: bool) -> Action {
        if let Some(policy) = self.policy.borrow_mut().as_mut() {
            F::decide(policy, &Turn::new(&ProxyWasm)).write(&ProxyWasm);
        }
        Action::Continue
    }

    fn on_log(&mut self) {
        if let Some(policy) = self.policy.borrow_mut().as_mut() {
            policy.finished(&Outcome::new(&ProxyWasm));
        }
    }
}
