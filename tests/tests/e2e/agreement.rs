//! The built-in policies, run as WebAssembly by the gateway's own chain, decide what the native built-in decides.

use bytes::Bytes;
use http::{HeaderMap, Method};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::SystemTime;
use turnstile::generation::Generation;
use turnstile::placement::{order_input, session_input};
use turnstile::policy::{PolicyEnv, RequestHead, RouteFacts, TurnFacts, TurnPolicies};
use turnstile_config::Phase;
use turnstile_fleet::decision::{Bound, Candidates, Decision, RouteInput, decide};
use turnstile_fleet::ids::{SessionKey, WorkerId};
use turnstile_fleet::route::Route;
use turnstile_fleet::session::{SessionAction, SessionMode, SessionView};
use turnstile_fleet::turn::{Turn, understand};
use turnstile_fleet::worker::{WorkerState, WorkerView};
use turnstile_tests::harness::{Rig, Setup, built_in, chat};

const CASES: u64 = 3000;

/// A sequence of numbers that depends on its seed alone.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        self.0 = turnstile_fleet::cost::mix(self.0);
        self.0 % below
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.roll(n) == 0
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        let at = self.roll(choices.len() as u64);
        choices[usize::try_from(at).unwrap()]
    }

    fn small(&mut self, below: u64) -> u32 {
        u32::try_from(self.roll(below)).unwrap()
    }
}

fn worker(dice: &mut Dice, index: u32) -> WorkerView {
    let mut view = WorkerView::new(format!("10.0.0.{index}:30000"), WorkerId(index));
    if dice.one_in(5) {
        view.state = dice.of(&[WorkerState::Draining, WorkerState::Unhealthy, WorkerState::Starting]);
    }
    // Few values, so that ties are common.
    view.in_flight = dice.small(4);
    view.in_flight_at_load = dice.small(4);
    view.running = dice.small(4);
    view.waiting = dice.of(&[0, 0, 0, 1, 7]);
    view.max_running = dice.of(&[0, 4, 64]);
    view.held_rows = dice.of(&[0, 0, 2]);
    view.limit = dice.of(&[None, None, Some(2)]);
    view.waiting_uncached_tokens = dice.of(&[0, 0, 500, 90_000]);
    view.kv_capacity_tokens = dice.of(&[0, 100_000]);
    view.kv_used_tokens = dice.of(&[0, 50_000, 95_000]);
    view.prefill_tokens_per_s = dice.of(&[8000.0, 8000.0, 0.5, 33_333.3]);
    view.pending_prefill_tokens = dice.of(&[0, 0, 4_000]);
    view.expected_decode_tokens = dice.of(&[0, 300]);
    view
}

fn turn(dice: &mut Dice, generation: &Generation) -> Turn {
    let mut nvext = json!({"agent_hints": {}});
    let hints = &mut nvext["agent_hints"];
    for (name, values) in [
        ("priority", [json!(0), json!(10), json!(-7), json!(100_000), json!(-100_000)]),
        ("strict_priority", [json!(0), json!(1), json!(9), json!(4_000_000_000_u32), Value::Null]),
        ("latency_sensitivity", [json!(0.5), json!(0), json!(1e9), json!(-3), Value::Null]),
    ] {
        if dice.one_in(2) {
            hints[name] = values[usize::try_from(dice.roll(5)).unwrap()].clone();
        }
    }
    if dice.one_in(2) {
        nvext["session_control"] = json!({"session_id": "s"});
        if let Some(action) = dice.of(&[None, Some("bind"), Some("open"), Some("close")]) {
            nvext["session_control"]["action"] = json!(action);
        }
        if dice.one_in(3) {
            nvext["session_control"]["timeout"] = json!(dice.of(&[0.5, 30.0, 86_400.0]));
        }
    }
    let mut body = chat(&"word ".repeat(usize::try_from(dice.roll(2000)).unwrap()));
    body["nvext"] = nvext;
    let route = dice.of(&[Route::Chat, Route::Generate, Route::Responses]);
    understand(route, &HeaderMap::new(), Bytes::from(body.to_string()), &generation.understand).unwrap()
}

fn session(dice: &mut Dice, turn: &Turn, workers: u32) -> Option<SessionView> {
    if turn.identity.session.is_none() || dice.one_in(3) {
        return None;
    }
    Some(SessionView {
        key: SessionKey(7),
        generation: 1,
        mode: dice.of(&[SessionMode::Affinity, SessionMode::Affinity, SessionMode::Tag, SessionMode::Stream]),
        worker: dice.of(&[true, true, false]).then(|| WorkerId(dice.small(u64::from(workers)))),
        rank: None,
        engine_open: true,
        awaiting_release: false,
        age_ms: 1000,
        idle_ms: 10,
        ttl_ms: 300_000,
        turns: 3,
        in_flight: 0,
        held_tokens: 500,
        last_cached_tokens: 100,
    })
}

/// What the native built-in and the policies decide about one random turn before a random fleet.
fn both(rig: &Rig, generation: &Arc<Generation>, dice: &mut Dice) -> (Decision, Decision) {
    let count = 1 + dice.small(6);
    let views: Arc<[WorkerView]> = (0..count).map(|index| worker(dice, index)).collect();
    let cached: Arc<[u64]> = (0..count).map(|_| dice.of(&[0, 0, 128, 1500])).collect();
    let turn = Arc::new(turn(dice, generation));
    let session = session(dice, &turn, count);
    let bound = session.as_ref().and_then(|s| Some(Bound { worker: s.worker?, mode: s.mode }));
    let excluded: Arc<[WorkerId]> = if dice.one_in(5) { Arc::new([WorkerId(dice.small(6))]) } else { Arc::new([]) };
    let prompt_tokens = turn.prompt_tokens(4.0);
    let action = turn.control.action.map_or(SessionAction::None, SessionAction::from);
    let input = RouteInput {
        candidates: Candidates::new(&views, &cached),
        prompt_tokens,
        affinity_hash: turn.prefix.affinity_hash,
        bound,
        excluded: &excluded,
    };
    let wanted = session_input(&turn, action, session.is_some(), generation.max_ttl_ms);
    let native = Arc::new(decide(&input, &order_input(&turn), &wanted, &generation.decide));

    let head = RequestHead {
        method: Method::POST,
        path: Bytes::from_static(b"/v1/chat/completions"),
        authority: Bytes::new(),
        headers: Arc::new(HeaderMap::new()),
        request_id: Arc::from("r"),
        peer: None,
        connection: 0,
        protocol: "HTTP/1.1",
        arrived: SystemTime::now(),
    };
    let facts = TurnFacts { turn: Arc::clone(&turn), prompt_tokens, action, number: 1, head };
    let env = PolicyEnv::new(Arc::new(facts), session.clone(), Arc::clone(&rig.gateway().store));
    let metrics = Arc::clone(&rig.gateway().metrics);
    let mut policies = TurnPolicies::new(Arc::clone(&generation.chain), env, 0, metrics);
    policies.run(Phase::Admit, &native);
    policies.env.place(
        RouteFacts {
            workers: Arc::clone(&views),
            cached_tokens: Arc::clone(&cached),
            excluded: Arc::clone(&excluded),
            bound: bound.map(|b| b.worker),
            limits: generation.decide.limits,
            attempt: 0,
            last_error: None,
        },
        session,
        Arc::clone(&native),
    );
    policies.run(Phase::Route, &native);
    assert!(policies.failed.is_empty() && policies.env.dropped.is_empty());
    let written = policies.env.decision.clone();
    policies.finish();
    let mut settled = written.clone();
    let followed = settled.settle(&native, &input, &generation.decide);
    assert!(followed || written.route.target.is_none(), "a policy chose what may not be chosen: {written:?}");
    (Decision::clone(&native), written)
}

#[tokio::test(flavor = "multi_thread")]
async fn wasm_and_native_decisions_agree() {
    let rig = Setup::new().plugins(&built_in()).start().await;
    let generation = rig.gateway().generation.load_full();
    for case in 0..CASES {
        let (native, wasm) = both(&rig, &generation, &mut Dice(case));
        assert_eq!(wasm.route.target, native.route.target, "case {case}");
        assert_eq!(wasm.queue.tier.unwrap_or(0), native.queue.tier.unwrap_or(0), "case {case}");
        assert_eq!(wasm.queue.head_start_ms.unwrap_or(0), native.queue.head_start_ms.unwrap_or(0), "case {case}");
        assert_eq!(wasm.engine_priority, native.engine_priority, "case {case}");
        assert_eq!(wasm.session.action, native.session.action, "case {case}");
        assert_eq!(wasm.session.ttl_ms, native.session.ttl_ms, "case {case}");
        assert_eq!(wasm.session.mode, native.session.mode, "case {case}");
    }
}
