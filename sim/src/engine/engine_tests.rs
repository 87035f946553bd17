#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::*;
use crate::config::Eviction;

fn engine(change: impl FnOnce(&mut SimConfig)) -> Engine {
    let mut config = SimConfig { max_total_tokens: 2000, context_length: 4096, ..SimConfig::default() };
    change(&mut config);
    Engine::new(Arc::new(config))
}

fn request(start: u32, prompt: u32, outputs: usize) -> Request {
    Request {
        prompt: (600 + start..600 + start + prompt).collect(),
        max_new_tokens: Some(outputs),
        ignore_eos: true,
        ..Request::default()
    }
}

/// Runs until nothing goes on by itself; returns the ends in their order.
fn run(engine: &mut Engine) -> Vec<(RequestKey, u64, Finish)> {
    let mut ends = Vec::new();
    while let Some(at) = engine.next_wake() {
        for event in engine.step(at) {
            if let EventKind::Finished(finish) = event.kind {
                ends.push((event.key, event.at_us, finish));
            }
        }
        check(engine);
        if engine.requests() == 0 {
            break;
        }
    }
    ends
}

fn check(engine: &Engine) {
    engine.radix.check_invariants();
    let held: usize = engine.running.iter().map(|active| active.private).sum::<usize>()
        + engine.sessions.idle_slots().map(|slot| slot.private).sum::<usize>();
    assert!(held + engine.radix.size() <= engine.config.max_total_tokens, "the pool is not overdrawn");
    assert!(engine.running.len() + engine.sessions.idle_slots().count() <= engine.config.max_running_requests);
}

#[test]
fn time_is_prefill_by_rate_then_a_step_for_each_token() {
    let mut engine = engine(|_| ());
    engine.submit(0, request(0, 800, 11));
    let ends = run(&mut engine);
    // 800 tokens at 8000 a second, then 10 steps of 6.35 ms.
    assert_eq!(ends[0].1, 100_000 + 10 * 6350);
    assert_eq!((ends[0].2.prompt_tokens, ends[0].2.completion_tokens), (800, 11));
}

#[test]
fn a_cached_prompt_takes_one_step() {
    let mut engine = engine(|_| ());
    engine.submit(0, request(0, 800, 1));
    let first = run(&mut engine)[0].1;
    engine.submit(first, request(0, 800, 1));
    let ends = run(&mut engine);
    assert_eq!((ends[0].1 - first, ends[0].2.cached_tokens), (6000, 799));
}

#[test]
fn a_batch_slows_each_of_its_requests() {
    let mut engine = engine(|_| ());
    for place in 0..4 {
        engine.submit(0, request(place * 100, 10, 50));
    }
    let ends = run(&mut engine);
    assert_eq!(ends.len(), 4);
    let steps = u64::try_from(49).unwrap();
    assert!(ends[3].1 >= steps * 7400, "{}", ends[3].1);
}

#[test]
fn a_long_prompt_is_computed_in_chunks_and_can_be_given_up_between_them() {
    let mut engine = engine(|config| {
        config.max_total_tokens = 100_000;
        config.context_length = 100_000;
        config.chunked_prefill_size = 1000;
    });
    let key = engine.submit(0, request(0, 50_000, 5));
    engine.step(200_000);
    engine.abort(200_000, key);
    let ends = run(&mut engine);
    assert_eq!(ends[0].2.reason, Reason::Aborted);
    assert!(ends[0].1 <= 375_000, "{}", ends[0].1);
    assert_eq!(engine.load().used_tokens, 0);
}

#[test]
fn everything_is_given_back_when_all_has_ended() {
    let mut engine = engine(|config| {
        config.page_size = 16;
        config.enable_priority_scheduling = true;
        config.eviction = Eviction::Priority;
    });
    let mut key = 0;
    for round in 0_u32..200 {
        let mut request = request(round * 37 % 11 * 1000, 50 + round * 13 % 300, (round * 7 % 40) as usize);
        request.priority = Some(i64::from(round % 5) * 10);
        key = engine.submit(u64::from(round) * 20_000, request);
        check(&engine);
        if round % 9 == 0 {
            engine.abort(u64::from(round) * 20_000 + 5, key);
        }
    }
    assert!(key > 0);
    run(&mut engine);
    assert_eq!((engine.requests(), engine.load().used_tokens), (0, 0));
    assert!(engine.flush(u64::MAX / 2));
    assert_eq!(engine.radix.size(), 0);
}

#[test]
fn a_pool_that_runs_dry_puts_a_request_back_and_all_finish() {
    let mut engine = engine(|_| ());
    for place in 0..6 {
        engine.submit(0, request(place * 1000, 200, 300));
    }
    let ends = run(&mut engine);
    assert_eq!(ends.len(), 6);
    assert!(ends.iter().all(|(.., end)| end.completion_tokens == 300));
}

#[test]
fn an_engine_told_the_same_does_the_same() {
    let story = || {
        let mut engine = engine(|_| ());
        for place in 0..20 {
            engine.submit(u64::from(place) * 3000, request(place % 3 * 50, 40 + place, 20));
        }
        run(&mut engine)
    };
    assert_eq!(story(), story());
}

#[test]
fn a_retracted_session_turn_goes_on_where_it_was() {
    let mut engine = engine(|config| {
        config.enable_streaming_session = true;
        config.enable_priority_scheduling = true;
        config.max_running_requests = 1;
    });
    assert!(engine.open_session(0, "s", true, None));
    let turn = |tokens| Request {
        session: Some(SessionParams { id: "s".to_owned(), ..SessionParams::default() }),
        priority: Some(0),
        ..request(0, 50, tokens)
    };
    let first = engine.submit(0, turn(200));
    engine.step(200_000);
    let urgent = engine.submit(200_000, Request { priority: Some(50), ..request(5000, 20, 3) });
    let ends = run(&mut engine);
    assert_eq!(ends.iter().map(|(key, ..)| *key).collect::<Vec<_>>(), [urgent, first]);
    assert_eq!((ends[1].2.retractions, ends[1].2.completion_tokens), (1, 200));
    engine.close_session(10_000_000, "s");
    assert_eq!(engine.load().used_tokens, 0);
}

/// Submits one that runs and then others of these priorities; the order in which they end.
fn order_of(priorities: &[Option<i64>], change: impl FnOnce(&mut SimConfig)) -> Vec<usize> {
    let mut engine = engine(|config| {
        config.max_running_requests = 1;
        change(config);
    });
    let first = engine.submit(0, Request { priority: Some(i64::MAX), ..request(0, 20, 50) });
    for (place, priority) in priorities.iter().enumerate() {
        let start = u32::try_from(place + 1).unwrap() * 1000;
        engine.submit(1000, Request { priority: *priority, ..request(start, 20, 5) });
    }
    let ends = run(&mut engine);
    let places = ends.iter().filter(|(key, ..)| *key != first);
    places.map(|(key, ..)| usize::try_from(key - first - 1).unwrap()).collect()
}

#[test]
fn larger_priorities_run_first_ties_by_arrival_and_none_is_the_least() {
    let priorities = [Some(1), None, Some(5), Some(5), Some(-3), Some(9)];
    let by_priority = order_of(&priorities, |config| config.enable_priority_scheduling = true);
    assert_eq!(by_priority, [5, 2, 3, 0, 4, 1]);
    assert_eq!(order_of(&priorities, |_| ()), [0, 1, 2, 3, 4, 5], "without the scheduling, arrival alone counts");
}

#[test]
fn more_than_ten_better_pushes_out_and_the_victim_goes_on() {
    for (priority, retractions) in [(10, 0), (11, 1)] {
        let mut engine = engine(|config| {
            config.max_running_requests = 1;
            config.enable_priority_scheduling = true;
        });
        let low = engine.submit(0, Request { priority: Some(0), ..request(0, 20, 400) });
        engine.step(300_000);
        engine.submit(300_000, Request { priority: Some(priority), ..request(1000, 20, 5) });
        let ends = run(&mut engine);
        let (.., end) = ends.iter().find(|(key, ..)| *key == low).unwrap();
        assert_eq!((end.retractions, end.completion_tokens), (retractions, 400));
        assert_eq!(ends[0].0 == low, retractions == 0);
    }
}

#[test]
fn the_first_that_does_not_fit_blocks_those_behind_it() {
    let mut engine = engine(|config| config.max_running_requests = 8);
    let running = engine.submit(0, request(0, 900, 300));
    let big = engine.submit(0, request(5000, 1500, 5));
    let small = engine.submit(0, request(9000, 20, 5));
    let order: Vec<RequestKey> = run(&mut engine).iter().map(|(key, ..)| *key).collect();
    assert_eq!(order, [running, big, small]);
}

#[test]
fn an_output_that_is_given_is_what_comes_out() {
    let mut engine = engine(|_| ());
    let output: Vec<TokenId> = (900..920).collect();
    let ask = |output: Vec<TokenId>, most| Request {
        prompt: vec![7; 4],
        output: Some(output),
        max_new_tokens: most,
        ..Request::default()
    };
    let key = engine.submit(0, ask(output.clone(), None));
    let mut came = Vec::new();
    let mut reason = None;
    while let Some(at) = engine.next_wake().filter(|_| reason.is_none()) {
        for event in engine.step(at).into_iter().filter(|event| event.key == key) {
            match event.kind {
                EventKind::Token { id, .. } => came.push(id),
                EventKind::Finished(finish) => reason = Some(finish.reason),
                EventKind::Started { .. } => {}
            }
        }
    }
    assert_eq!((came, reason), (output.clone(), Some(Reason::StopToken(919))));

    // The next turn begins with both, and finds all but the last token, whose KV was never computed.
    let prompt: Vec<TokenId> = [&[7; 4][..], &output, &[8; 3]].concat();
    let now = engine.now_us;
    engine.submit(now, Request { prompt, output: Some(vec![]), ..Request::default() });
    let finish = &run(&mut engine)[0].2;
    assert_eq!((finish.cached_tokens, finish.completion_tokens), (23, 1));

    let now = engine.now_us;
    engine.submit(now, ask(output, Some(5)));
    let finish = &run(&mut engine)[0].2;
    assert_eq!((&finish.reason, finish.completion_tokens), (&Reason::Length(5), 5));
}
