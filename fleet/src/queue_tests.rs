#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;

use super::*;

fn ticket(id: u64) -> Ticket {
    Ticket {
        id,
        tier: 0,
        head_start_ms: 0,
        arrival_ms: id * 1_000,
        flow: 0,
        uncached_tokens: 0,
        bytes: 1,
        deadline_ms: None,
        pool: 0,
        pinned: None,
    }
}

fn queue() -> Queue {
    Queue::new(QueueOptions { max_tickets: 100, max_bytes: 100, fairness: None })
}

fn drain(queue: &mut Queue) -> Vec<u64> {
    std::iter::from_fn(|| queue.pop_next(0, |_| true)).map(|ticket| ticket.id).collect()
}

#[test]
fn tiers_are_strict_and_head_start_counts_within_one() {
    let mut queue = queue();
    for waiting in [
        ticket(1),
        Ticket { head_start_ms: 2_500, ..ticket(3) },
        Ticket { head_start_ms: 5_000, ..ticket(8) },
        Ticket { tier: 1, head_start_ms: -60_000, ..ticket(9) },
    ] {
        queue.push(waiting).unwrap();
    }
    // 3 s - 2.5 s is before 1 s; 8 s - 5 s is not.
    assert_eq!(drain(&mut queue), [9, 3, 1, 8]);
}

#[test]
fn a_setback_demotes_and_ages_away() {
    let mut queue = queue();
    queue.push(Ticket { head_start_ms: -3_000, ..ticket(1) }).unwrap();
    for id in [2, 3, 4, 5] {
        queue.push(ticket(id)).unwrap();
    }
    assert_eq!(drain(&mut queue), [2, 3, 1, 4, 5], "equal at 4 s: the one that came first goes first");
}

#[test]
fn push_tells_how_many_are_before() {
    let mut queue = queue();
    assert_eq!(queue.push(ticket(1)), Ok(0));
    assert_eq!(queue.push(ticket(2)), Ok(1));
    assert_eq!(queue.push(Ticket { tier: 5, ..ticket(3) }), Ok(0));
    assert_eq!((queue.position(2), queue.position(7)), (Some(2), None));
}

#[test]
fn the_queue_is_bounded_in_turns_and_bytes_and_ids_are_unique() {
    let mut queue = Queue::new(QueueOptions { max_tickets: 3, max_bytes: 10, fairness: None });
    queue.push(Ticket { bytes: 6, ..ticket(1) }).unwrap();
    assert_eq!(queue.push(Ticket { bytes: 5, ..ticket(2) }), Err(Full::Bytes));
    queue.push(Ticket { bytes: 4, ..ticket(2) }).unwrap();
    assert_eq!(queue.push(ticket(2)), Err(Full::Duplicate));
    queue.push(Ticket { bytes: 0, ..ticket(3) }).unwrap();
    assert_eq!(queue.push(Ticket { bytes: 0, ..ticket(4) }), Err(Full::Tickets));
    assert_eq!((queue.len(), queue.bytes()), (3, 10));
    assert_eq!(queue.remove(1).map(|ticket| ticket.bytes), Some(6));
    assert_eq!(queue.remove(1), None);
    assert_eq!((queue.len(), queue.bytes()), (2, 4));
}

#[test]
fn a_blocked_head_is_skipped() {
    let mut queue = queue();
    queue.push(Ticket { pinned: Some(WorkerId(1)), ..ticket(1) }).unwrap();
    queue.push(Ticket { pool: 2, ..ticket(2) }).unwrap();
    queue.push(ticket(3)).unwrap();
    let free = |ticket: &Ticket| ticket.pinned.is_none() && ticket.pool == 0;
    assert_eq!(queue.pop_next(0, free).map(|ticket| ticket.id), Some(3));
    assert_eq!(queue.pop_next(0, free), None);
    assert_eq!(queue.len(), 2, "the blocked ones still wait");
}

#[test]
fn deadlines_take_turns_out_the_longest_overdue_first() {
    let mut queue = queue();
    queue.push(Ticket { deadline_ms: Some(500), ..ticket(1) }).unwrap();
    queue.push(Ticket { deadline_ms: Some(400), ..ticket(2) }).unwrap();
    queue.push(ticket(3)).unwrap();
    assert_eq!(queue.next_deadline_ms(), Some(400));
    assert!(queue.expired(399).is_empty());
    assert_eq!(queue.expired(500).iter().map(|ticket| ticket.id).collect::<Vec<_>>(), [2, 1]);
    assert_eq!((queue.next_deadline_ms(), queue.len()), (None, 1));
}

#[test]
fn the_wait_is_estimated_from_the_rate_at_which_turns_leave() {
    let mut queue = queue();
    assert_eq!(queue.estimate_wait_ms(3, 0), None);
    assert_eq!(queue.retry_after_s(0, 5, 60), 5, "nothing is known yet");
    for id in 0..50 {
        queue.push(Ticket { arrival_ms: 10_000, ..ticket(id) }).unwrap();
    }
    for departure in 1..=40 {
        queue.pop_next(10_000 + departure * 200, |_| true).unwrap();
    }
    let now_ms = 10_000 + 40 * 200;
    assert_eq!(queue.estimate_wait_ms(0, now_ms), Some(200));
    assert_eq!(queue.estimate_wait_ms(9, now_ms), Some(2_000));
    assert_eq!(queue.retry_after_s(now_ms, 5, 60), 3, "10 before it and itself, at 200 ms: 2.2 s");
    assert_eq!(queue.retry_after_s(now_ms, 5, 2), 2);
    assert_eq!(queue.estimate_wait_ms(9, now_ms + 30_000), Some(31_800), "a queue that stopped is not believed");
}

#[test]
fn time_without_a_queue_is_no_slow_departure() {
    let mut queue = queue();
    queue.push(Ticket { arrival_ms: 0, ..ticket(1) }).unwrap();
    queue.pop_next(100, |_| true).unwrap();
    queue.push(Ticket { arrival_ms: 3_600_000, ..ticket(2) }).unwrap();
    queue.pop_next(3_600_100, |_| true).unwrap();
    assert_eq!(queue.estimate_wait_ms(0, 3_600_100), Some(100));
}

fn fair() -> Queue {
    let fairness = Fairness { tokens_per_s: 1_000, max_setback_ms: 10_000 };
    Queue::new(QueueOptions { max_tickets: 100, max_bytes: 1_000, fairness: Some(fairness) })
}

fn charged(id: u64, flow: u64, uncached_tokens: u64) -> Ticket {
    Ticket { flow, uncached_tokens, arrival_ms: 1_000, ..ticket(id) }
}

#[test]
fn a_flow_beyond_its_rate_is_set_back_behind_those_within_theirs() {
    let mut queue = fair();
    for id in 1..=3 {
        queue.push(charged(id, 7, 4_000)).unwrap();
    }
    queue.push(Ticket { arrival_ms: 3_000, ..charged(4, 8, 4_000) }).unwrap();
    // Setbacks of flow 7: 0, 4 s, 8 s; flow 8 came 2 s later and owes nothing.
    assert_eq!(drain(&mut queue), [1, 4, 2, 3]);
}

#[test]
fn a_setback_is_bounded_and_what_is_owed_leaks_away() {
    let mut queue = fair();
    queue.push(charged(1, 7, 1_000_000)).unwrap();
    queue.push(charged(2, 7, 10)).unwrap();
    queue.push(Ticket { arrival_ms: 11_500, ..charged(3, 8, 0) }).unwrap();
    assert_eq!(drain(&mut queue), [1, 2, 3], "10 s at most, though a thousand seconds are owed");
    queue.push(Ticket { arrival_ms: 3_000_000, ..charged(4, 7, 10) }).unwrap();
    queue.push(Ticket { arrival_ms: 3_000_001, ..charged(5, 8, 10) }).unwrap();
    assert_eq!(drain(&mut queue), [4, 5], "it is forgiven in the end");
}

#[test]
fn a_turn_that_left_unserved_is_not_charged() {
    let mut queue = fair();
    queue.push(charged(1, 7, 9_000)).unwrap();
    queue.remove(1).unwrap();
    queue.push(charged(2, 7, 10)).unwrap();
    queue.push(Ticket { arrival_ms: 1_001, ..charged(3, 8, 10) }).unwrap();
    assert_eq!(drain(&mut queue), [2, 3]);
}

#[test]
fn flows_are_bounded() {
    let fairness = Some(Fairness { tokens_per_s: 1, max_setback_ms: 1_000_000 });
    let mut queue = Queue::new(QueueOptions { max_tickets: 2, max_bytes: 100, fairness });
    for flow in 0..1_000 {
        queue.push(charged(flow, flow, 1_000)).unwrap();
        queue.pop_next(1_000, |_| true).unwrap();
    }
    assert!(queue.flows.len() <= 2 * FLOWS_PER_TICKET);
    queue.push(Ticket { arrival_ms: 10_000_000, ..charged(1_000, 1_000, 1) }).unwrap();
    assert_eq!(queue.flows.len(), 1, "flows that owe nothing make room");
}

// === against a model ===

#[derive(Debug, Clone)]
enum Step {
    Push { tier: u32, head_start_ms: i64, wait_ms: u64, bytes: u64, deadline_ms: Option<u64>, flow: u64, tokens: u64 },
    Pop { pool: u32 },
    Remove(u64),
    Expire { wait_ms: u64 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        5 => (0..3_u32, -5_000..5_000_i64, 0..1_000_u64, 0..40_u64, prop::option::of(0..5_000_u64), 0..3_u64, 0..3_000_u64)
            .prop_map(|(tier, head_start_ms, wait_ms, bytes, deadline_ms, flow, tokens)| {
                Step::Push { tier, head_start_ms, wait_ms, bytes, deadline_ms, flow, tokens }
            }),
        3 => (0..3_u32).prop_map(|pool| Step::Pop { pool }),
        1 => (0..60_u64).prop_map(Step::Remove),
        1 => (0..3_000_u64).prop_map(|wait_ms| Step::Expire { wait_ms }),
    ];
    prop::collection::vec(step, 0..80)
}

/// A vector, sorted after each push; setbacks by the definition.
#[derive(Default)]
struct Model {
    waiting: Vec<(u32, i64, Ticket)>,
    owed_ms: [f64; 3],
    at_ms: u64,
}

const SETBACK_MS: f64 = 4_000.0;

impl Model {
    fn wait(&mut self, now_ms: u64) {
        for owed in &mut self.owed_ms {
            *owed = (*owed - (now_ms - self.at_ms) as f64).max(0.0);
        }
        self.at_ms = now_ms;
    }

    /// At 1000 tokens a second a token is owed for 1 ms.
    fn push(&mut self, ticket: Ticket, fair: bool) {
        let owed = &mut self.owed_ms[ticket.flow as usize];
        let setback = if fair { owed.min(SETBACK_MS) } else { 0.0 };
        *owed = (*owed + ticket.uncached_tokens as f64).min(SETBACK_MS + ticket.uncached_tokens as f64);
        let effective = ticket.arrival_ms as i64 - ticket.head_start_ms + setback as i64;
        self.waiting.push((ticket.tier, effective, ticket));
        // Stable: equal ones stay in order of arrival.
        self.waiting.sort_by_key(|&(tier, effective, _)| (std::cmp::Reverse(tier), effective));
    }

    fn take(&mut self, which: impl Fn(&Ticket) -> bool) -> Option<Ticket> {
        let at = self.waiting.iter().position(|(_, _, ticket)| which(ticket))?;
        Some(self.waiting.remove(at).2)
    }

    fn unserved(&mut self, ticket: &Ticket) {
        let owed = &mut self.owed_ms[ticket.flow as usize];
        *owed = (*owed - ticket.uncached_tokens as f64).max(0.0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_queue_behaves_as_a_sorted_list(steps in steps(), fair in any::<bool>()) {
        let fairness = fair.then_some(Fairness { tokens_per_s: 1_000, max_setback_ms: SETBACK_MS as u64 });
        let mut queue = Queue::new(QueueOptions { max_tickets: 12, max_bytes: 200, fairness });
        let mut model = Model::default();
        let (mut now_ms, mut id) = (0, 0);
        for step in steps {
            match step {
                Step::Push { tier, head_start_ms, wait_ms, bytes, deadline_ms, flow, tokens } => {
                    now_ms += wait_ms;
                    model.wait(now_ms);
                    let deadline_ms = deadline_ms.map(|ms| now_ms + ms);
                    let ticket = Ticket {
                        id, tier, head_start_ms, arrival_ms: now_ms, flow, uncached_tokens: tokens, bytes, deadline_ms,
                        pool: (id % 3) as u32, pinned: None,
                    };
                    id += 1;
                    let held: u64 = model.waiting.iter().map(|(_, _, ticket)| ticket.bytes).sum();
                    let expected = if model.waiting.len() >= 12 {
                        Err(Full::Tickets)
                    } else if held + bytes > 200 {
                        Err(Full::Bytes)
                    } else {
                        model.push(ticket, fair);
                        Ok(model.waiting.iter().position(|(_, _, other)| other.id == ticket.id).unwrap())
                    };
                    prop_assert_eq!(queue.push(ticket), expected);
                }
                Step::Pop { pool } => {
                    let fits = |ticket: &Ticket| ticket.pool == pool;
                    prop_assert_eq!(queue.pop_next(now_ms, fits), model.take(fits));
                }
                Step::Remove(id) => {
                    let expected = model.take(|ticket| ticket.id == id);
                    expected.iter().for_each(|ticket| model.unserved(ticket));
                    prop_assert_eq!(queue.remove(id), expected);
                }
                Step::Expire { wait_ms } => {
                    now_ms += wait_ms;
                    let mut expected = Vec::new();
                    while let Some(ticket) = model.take(|ticket| ticket.deadline_ms.is_some_and(|ms| ms <= now_ms)) {
                        expected.push(ticket);
                    }
                    expected.iter().for_each(|ticket| model.unserved(ticket));
                    expected.sort_by_key(|ticket| (ticket.deadline_ms, ticket.id));
                    prop_assert_eq!(queue.expired(now_ms), expected);
                }
            }
            let order: Vec<u64> = queue.iter().map(|ticket| ticket.id).collect();
            let expected: Vec<u64> = model.waiting.iter().map(|(_, _, ticket)| ticket.id).collect();
            prop_assert_eq!(order, expected);
            prop_assert_eq!(queue.bytes(), model.waiting.iter().map(|(_, _, ticket)| ticket.bytes).sum::<u64>());
            let next = model.waiting.iter().filter_map(|(_, _, ticket)| ticket.deadline_ms).min();
            prop_assert_eq!(queue.next_deadline_ms(), next);
        }
    }
}
