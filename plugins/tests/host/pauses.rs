//! Streams that wait: callbacks of other contexts reach their environment, and their owner is woken.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use turnstile_plugins::{Action, CallCommand, Effects, Fault, FaultKind, HttpEnv, HttpReply, Lent, PluginSpec, Stream};

use crate::rig::{Guest, Rig, data, header, map, request};

#[derive(Default)]
struct Alarm(AtomicUsize);

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Pauses requests after a call; the reply sets a header of the paused stream and continues it. The context that paused is
/// kept at 904.
fn gate(reply: &str) -> Rig {
    gatekeeper(reply, "").start()
}

/// The same, before it is started; `more` is done on request headers too.
fn gatekeeper(reply: &str, more: &str) -> Guest {
    let headers = map(&[(":method", "GET"), (":path", "/"), (":authority", "a")]);
    Guest::new(&format!(
        r#"{}{}
        (data (i32.const 300) "x-checkedyes")
        (func (export "proxy_on_request_headers") (param $context i32) (param i32 i32) (result i32)
          {more}
          (i32.store (i32.const 904) (local.get $context))
          (drop (call $http_call (i32.const 100) (i32.const 4) (i32.const 200) (i32.const {})
            (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 900)))
          (i32.const 1))
        (func $release
          (if (call $effective (i32.load (i32.const 904))) (then unreachable))
          (drop (call $replace_header (i32.const 0) (i32.const 300) (i32.const 9) (i32.const 309) (i32.const 3)))
          (drop (call $continue_stream (i32.const 0))))
        (func (export "proxy_on_http_call_response") (param i32 i32 i32 i32 i32) {reply})"#,
        data(100, b"auth"),
        data(200, &headers),
        headers.len(),
    ))
}

fn answer() -> Result<HttpReply, String> {
    let nothing = http::HeaderMap::new;
    Ok(HttpReply { status: http::StatusCode::OK, headers: nothing(), body: "".into(), trailers: nothing() })
}

fn paused(rig: &Rig) -> (Stream, Lent<HttpEnv>) {
    let (mut stream, mut env) = (rig.stream(), request());
    assert!(stream.on_request_headers(&mut env, true).unwrap().paused_request());
    (stream, env)
}

/// Waits for effects; `meanwhile` runs between two looks.
fn wait(
    stream: &mut Stream,
    env: &mut Lent<HttpEnv>,
    meanwhile: impl FnOnce(),
) -> (Poll<Result<Effects, Box<Fault>>>, usize) {
    let alarm = Arc::new(Alarm::default());
    let waker = Waker::from(Arc::clone(&alarm));
    let mut cx = Context::from_waker(&waker);
    let parked = env.park();
    assert!(stream.poll_effects(&mut cx, parked.berth()).is_pending());
    meanwhile();
    let rings = alarm.0.load(Ordering::SeqCst);
    (stream.poll_effects(&mut cx, parked.berth()), rings)
}

#[test]
fn a_reply_edits_a_paused_stream_and_wakes_its_owner() {
    let rig = gate("(call $release)");
    let (mut stream, mut env) = paused(&rig);
    let (handle, _) = rig.call();
    let (effects, rings) = wait(&mut stream, &mut env, || handle.http(answer()).unwrap());
    let Poll::Ready(Ok(effects)) = effects else { panic!("{effects:?}") };
    assert!(effects.continue_request);
    assert_eq!(rings, 1);
    assert_eq!(header(&env, "x-checked").unwrap(), b"yes");
}

#[test]
fn a_reply_finds_a_stream_in_an_instance_of_its_own_and_in_one_that_was_replaced() {
    let grows = gatekeeper("(call $release)", "(drop (memory.grow (i32.const 16)))").spec();
    let own = PluginSpec { stream_isolation: true, ..grows.clone() };
    for spec in [own, PluginSpec { recycle_bytes: Some(1 << 20), ..grows }] {
        let replaced = usize::from(spec.recycle_bytes.is_some());
        let rig = Rig::start(spec).unwrap();
        let (mut stream, mut env) = paused(&rig);
        let (handle, _) = rig.call();
        assert_eq!(rig.plugin.tick(0).recycled, replaced);
        assert!(stream.has_calls());
        let (effects, rings) = wait(&mut stream, &mut env, || handle.http(answer()).unwrap());
        let Poll::Ready(Ok(effects)) = effects else { panic!("{effects:?}") };
        assert!(effects.continue_request && !stream.has_calls());
        assert_eq!((rings, header(&env, "x-checked").unwrap()), (1, b"yes".to_vec()));
        stream.finish(&mut env).unwrap();
        assert_eq!(rig.plugin.stats().open_calls, 0);
    }
}

#[test]
fn calls_end_with_the_instance_that_a_stream_had_for_itself() {
    for breaks in [false, true] {
        let reply = if breaks { "unreachable" } else { "(call $release)" };
        let rig = Rig::start(PluginSpec { stream_isolation: true, ..gatekeeper(reply, "").spec() }).unwrap();
        let (mut stream, mut env) = paused(&rig);
        let (handle, _) = rig.call();
        if breaks {
            handle.http(answer()).unwrap_err();
            assert_eq!(stream.on_request_headers(&mut env, true).unwrap_err().kind, FaultKind::Lost);
            assert_eq!(rig.plugin.tick(0).crash_streak, 1);
        } else {
            stream.finish(&mut env).unwrap();
            handle.http(answer()).unwrap();
        }
        assert_eq!(rig.plugin.stats().open_calls, 0);
    }
}

#[test]
fn a_stream_whose_owner_is_at_work_can_be_continued_but_not_edited() {
    let rig = gate("(call $release)");
    let (mut stream, env) = paused(&rig);
    rig.call().0.http(answer()).unwrap();
    assert!(stream.take_effects().continue_request);
    assert_eq!(header(&env, "x-checked"), None);
    assert_eq!(rig.plugin.stats().tolerated, 1);
}

#[test]
fn a_reply_can_tell_whether_the_stream_waits_already() {
    let rig = gate("");
    let (mut stream, mut env) = paused(&rig);
    let (handle, _) = rig.call();
    assert!(handle.finds_owner_at_work(), "it has paused, and is on its way");
    let (waits, _) = wait(&mut stream, &mut env, || assert!(!handle.finds_owner_at_work(), "it is there"));
    assert!(waits.is_pending());
    assert!(handle.finds_owner_at_work(), "it looks at something else for a moment");
}

#[test]
fn no_reply_waits_for_a_stream_whose_calls_are_over() {
    let rig = gate("");
    let (mut stream, _env) = paused(&rig);
    let (handle, _) = rig.call();
    stream.cancel_calls();
    assert!(!handle.finds_owner_at_work());
}

#[test]
fn no_reply_waits_for_a_stream_that_another_one_has_continued() {
    let headers = map(&[(":method", "GET"), (":path", "/"), (":authority", "a")]).len();
    let again = format!(
        "(drop (call $http_call (i32.const 100) (i32.const 4) (i32.const 200) (i32.const {headers})
          (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 900)))"
    );
    let rig = gatekeeper("(call $release)", &again).start();
    let (mut stream, _env) = paused(&rig);
    let mut calls = rig.commands().into_iter().map(|command| match command {
        CallCommand::Start(handle, _) => handle,
        other => panic!("{other:?}"),
    });
    let (first, second) = (calls.next().unwrap(), calls.next().unwrap());
    assert!(second.finds_owner_at_work());
    first.http(answer()).unwrap();
    assert!(stream.take_effects().continue_request);
    assert!(!second.finds_owner_at_work(), "nobody is on the way to wait");
}

#[test]
fn a_trap_in_the_reply_wakes_the_owner_and_leaves_it_its_environment() {
    let rig = gate("(call $release) unreachable");
    let (mut stream, mut env) = paused(&rig);
    let (handle, _) = rig.call();
    let (effects, rings) = wait(&mut stream, &mut env, || {
        handle.http(answer()).unwrap_err();
    });
    let Poll::Ready(Err(fault)) = effects else { panic!("{effects:?}") };
    assert_eq!((fault.kind, rings), (FaultKind::Lost, 1));
    assert_eq!(header(&env, "accept").unwrap(), b"first");
}

#[test]
fn an_owner_that_stops_waiting_has_its_environment_again() {
    let rig = gate("(call $release)");
    let (mut stream, mut env) = paused(&rig);
    let (effects, _) = wait(&mut stream, &mut env, || ());
    assert!(effects.is_pending());
    assert_eq!(header(&env, "accept").unwrap(), b"first");
    rig.call().0.http(answer()).unwrap();
    stream.finish(&mut env).unwrap();
}

#[test]
fn ticks_and_queues_resume_streams() {
    for by in ["tick", "queue"] {
        let rig = Guest::new(&format!(
            r#"(data (i32.const 100) "q")
            (func (export "proxy_on_configure") (param i32 i32) (result i32)
              (drop (call $set_tick (i32.const {})))
              (drop (call $register_queue (i32.const 100) (i32.const 1) (i32.const 908)))
              (i32.const 1))
            (func (export "proxy_on_request_headers") (param $context i32) (param i32 i32) (result i32)
              (i32.store (i32.const 904) (local.get $context))
              (if (i32.eqz (i32.const {})) (then
                (drop (call $enqueue (i32.load (i32.const 908)) (i32.const 100) (i32.const 1)))))
              (i32.const 1))
            (func $release
              (drop (call $effective (i32.load (i32.const 904))))
              (drop (call $continue_stream (i32.const 0))))
            (func (export "proxy_on_tick") (param i32) (call $release))
            (func (export "proxy_on_queue_ready") (param i32 i32) (call $release))"#,
            if by == "tick" { 10 } else { 0 },
            i32::from(by == "tick"),
        ))
        .start();
        if by == "tick" {
            rig.plugin.tick(0);
        }
        let (mut stream, mut env) = paused(&rig);
        let (effects, rings) = wait(&mut stream, &mut env, || {
            assert!(rig.plugin.tick(10).faults.is_empty());
        });
        let Poll::Ready(Ok(effects)) = effects else { panic!("{by}: {effects:?}") };
        assert!(effects.continue_request, "{by}");
        assert_eq!(rings, 1, "{by}");
    }
}

/// A tick or a queue that acts for a stream which has paused, before its owner has come to where it waits. The guest logs `tick`
/// before it acts.
fn acts_early(by: &str) -> Guest {
    Guest::new(&format!(
        r#"(data (i32.const 100) "q") (data (i32.const 300) "x-checkedyestick")
        (func (export "proxy_on_configure") (param i32 i32) (result i32)
          (drop (call $set_tick (i32.const {})))
          (drop (call $register_queue (i32.const 100) (i32.const 1) (i32.const 908)))
          (i32.const 1))
        (func (export "proxy_on_request_headers") (param $context i32) (param i32 i32) (result i32)
          (i32.store (i32.const 904) (local.get $context))
          (drop (call $enqueue (i32.load (i32.const 908)) (i32.const 100) (i32.const 1)))
          (i32.const 1))
        (func $act
          (drop (call $log (i32.const 2) (i32.const 312) (i32.const 4)))
          (drop (call $effective (i32.load (i32.const 904))))
          (drop (call $replace_header (i32.const 0) (i32.const 300) (i32.const 9) (i32.const 309) (i32.const 3)))
          (drop (call $continue_stream (i32.const 0))))
        (func (export "proxy_on_tick") (param i32) {})
        (func (export "proxy_on_queue_ready") (param i32 i32) {})"#,
        if by == "tick" { 10 } else { 0 },
        if by == "tick" { "(call $act)" } else { "" },
        if by == "queue" { "(call $act)" } else { "" },
    ))
}

#[test]
fn ticks_and_queues_look_out_for_a_stream_that_is_on_its_way_to_wait() {
    for by in ["tick", "queue"] {
        let mut spec = acts_early(by).spec();
        spec.limits.callback_deadline_ms = 10_000;
        // An owner whose thread the system puts aside comes too late, and the edit is lost as before: another try shows it.
        let edited = (0..20).any(|_| {
            let rig = Rig::start(spec.clone()).unwrap();
            rig.plugin.tick(0);
            let (mut stream, mut env) = paused(&rig);
            std::thread::scope(|threads| {
                threads.spawn(|| rig.plugin.tick(10));
                while !rig.gateway.lines.lock().iter().any(|(_, line)| line == "tick") {
                    std::thread::yield_now();
                }
                // It has asked for the stream by now.
                std::thread::sleep(Duration::from_millis(2));
                let mut cx = Context::from_waker(Waker::noop());
                let parked = env.park();
                while stream.poll_effects(&mut cx, parked.berth()).is_pending() {
                    std::thread::yield_now();
                }
            });
            header(&env, "x-checked").as_deref() == Some(b"yes") && rig.plugin.stats().tolerated == 0
        });
        assert!(edited, "{by}");
    }
}

#[test]
fn nobody_looks_out_for_a_stream_that_is_not_waited_for() {
    let rig = gate("(call $release)");
    let (mut stream, _env) = paused(&rig);
    let (handle, _) = rig.call();
    assert!(handle.finds_owner_at_work());
    stream.goes_on();
    assert!(!handle.finds_owner_at_work());
}

#[test]
fn a_stream_that_is_continued_before_it_pauses_still_pauses() {
    let rig = Guest::new(
        r#"(func (export "proxy_on_configure") (param i32 i32) (result i32)
             (drop (call $set_tick (i32.const 10))) (i32.const 1))
           (func (export "proxy_on_request_headers") (param $context i32) (param i32 i32) (result i32)
             (i32.store (i32.const 904) (local.get $context)) (i32.const 0))
           (func (export "proxy_on_request_body") (param i32 i32 i32) (result i32) (i32.const 1))
           (func (export "proxy_on_tick") (param i32)
             (drop (call $effective (i32.load (i32.const 904))))
             (drop (call $continue_stream (i32.const 0))))"#,
    )
    .start();
    let (mut stream, mut env) = (rig.stream(), request());
    stream.on_request_headers(&mut env, false).unwrap();
    rig.plugin.tick(0);
    rig.plugin.tick(10);
    assert!(stream.on_request_body(&mut env, 0, true).unwrap().paused_request());
    let (effects, _) = wait(&mut stream, &mut env, || ());
    assert!(effects.is_pending(), "{effects:?}");
    let (effects, rings) = wait(&mut stream, &mut env, || {
        rig.plugin.tick(20);
    });
    assert!(matches!(effects, Poll::Ready(Ok(effects)) if effects.continue_request));
    assert_eq!(rings, 1);
}

/// Body of a response is held; ticks continue it; an event comes beside it, in which the guest continues the stream if `by_event`.
fn holder(by_event: bool) -> Rig {
    let (tick, event) = if by_event { ("", "(call $go)") } else { ("(call $go)", "") };
    Guest::new(&format!(
        r#"(func (export "proxy_on_configure") (param i32 i32) (result i32)
             (drop (call $set_tick (i32.const 10))) (i32.const 1))
           (func (export "proxy_on_request_headers") (param $context i32) (param i32 i32) (result i32)
             (i32.store (i32.const 904) (local.get $context)) (i32.const 0))
           (func (export "proxy_on_response_body") (param i32 i32 i32) (result i32) (i32.const 1))
           (func $go
             (drop (call $effective (i32.load (i32.const 904))))
             (drop (call $continue_stream (i32.const 1))))
           (func (export "proxy_on_tick") (param i32) {tick})
           (func (export "proxy_on_foreign_function") (param i32 i32 i32) {event})"#,
    ))
    .start()
}

#[test]
fn an_event_beside_a_held_stream_neither_ends_its_pause_nor_takes_what_continues_it() {
    for by_event in [false, true] {
        let rig = holder(by_event);
        rig.plugin.tick(0);
        let (mut stream, mut env) = (rig.stream(), request());
        stream.on_request_headers(&mut env, true).unwrap();
        assert_eq!(stream.on_response_body(&mut env, 0, false).unwrap().action, Action::Pause);
        rig.plugin.tick(10);
        let told = stream.on_foreign_function(&mut env, 1, "{}".into()).unwrap();
        assert!(!told.effects.continue_response, "it is kept for whoever waits");
        let mut cx = Context::from_waker(Waker::noop());
        let parked = env.park();
        let effects = stream.poll_effects(&mut cx, parked.berth());
        assert!(matches!(effects, Poll::Ready(Ok(effects)) if effects.continue_response), "by event: {by_event}");
    }
}
