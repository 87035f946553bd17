//! What a schedule consists of: clients with their turns, a fleet, and how often what goes wrong.

use super::dice::Dice;
use turnstile_fleet::session::SessionAction;

/// How often something goes wrong, in a thousand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Faults {
    /// A client leaves its turn.
    pub leave: u64,
    /// A worker's process dies, for each second.
    pub kill: u64,
    /// A reload takes a worker out, for each second.
    pub remove: u64,
    /// `/open_session` is refused.
    pub refuse_open: u64,
    /// `/open_session` is answered too late; it may be worked on even later.
    pub slow_open: u64,
    /// `/abort_request` does not arrive.
    pub lose_abort: u64,
    /// `/close_session` fails: 5xx, or lost on its way there or back.
    pub fail_close: u64,
    /// `/close_session` is refused for good.
    pub refuse_close: u64,
    /// A message is slow.
    pub slow: u64,
    /// A worker refuses a turn before it runs.
    pub refuse_turn: u64,
    /// A connection breaks while a turn runs.
    pub cut: u64,
}

/// One turn.
#[derive(Debug, Clone)]
pub struct Step {
    /// When it arrives, ms.
    pub at_ms: u64,
    /// What it asks of its session.
    pub action: SessionAction,
    /// New tokens.
    pub tokens: usize,
    /// Output tokens.
    pub output: usize,
    /// The client leaves so long after its arrival, ms.
    pub leaves_after_ms: Option<u64>,
}

/// One client.
#[derive(Debug, Clone)]
pub struct Client {
    /// Whose credential it has.
    pub tenant: u64,
    /// How it names its session; others may use the same name.
    pub text: String,
    /// It speaks `/generate`, and sends only what is new; else chat, with the whole history.
    pub deltas: bool,
    /// Idle timeout it asks for, ms.
    pub ttl_ms: u64,
    /// Its turns, by time.
    pub steps: Vec<Step>,
}

/// A schedule.
#[derive(Debug, Clone)]
pub struct Plan {
    /// All of it follows from this, and from what was left out.
    pub seed: u64,
    /// Clients.
    pub clients: Vec<Client>,
    /// Workers.
    pub processes: usize,
    /// Data-parallel ranks of each.
    pub ranks: u32,
    /// `max_running_requests` of a rank.
    pub rows: usize,
    /// KV pool of a rank, tokens.
    pub pool: usize,
    /// Workers know tags, too.
    pub tags: bool,
    /// `busy = "refuse"`.
    pub refuse: bool,
    /// Sessions kept.
    pub max_sessions: usize,
    /// Side requests at a time.
    pub side_queue: usize,
    /// What goes wrong.
    pub faults: Faults,
}

/// Turns arrive until then, ms.
pub const LAST_ARRIVAL_MS: u64 = 40_000;

impl Plan {
    /// The schedule of a seed. Each hundredth is a large one.
    pub fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed, 0);
        let large = seed % 100 == 99;
        let clients = if large { dice.within(400, 1_000) } else { dice.within(2, 40) };
        let names = if large { clients } else { dice.within(1, clients) };
        // What goes wrong at all is drawn for each schedule, so that some have one fault only and some have them all.
        let mut rate = |most: u64| if dice.chance(600) { dice.below(most + 1) } else { 0 };
        let faults = Faults {
            leave: rate(400),
            kill: rate(60),
            remove: rate(40),
            refuse_open: rate(200),
            slow_open: rate(200),
            lose_abort: rate(300),
            fail_close: rate(500),
            refuse_close: rate(50),
            slow: rate(300),
            refuse_turn: rate(150),
            cut: rate(100),
        };
        let clients = (0..clients).map(|number| client(seed, number, names)).collect();
        Self {
            seed,
            clients,
            processes: usize::try_from(dice.within(1, 3)).unwrap_or(1),
            ranks: [1, 1, 1, 2][usize::try_from(dice.below(4)).unwrap_or(0)],
            rows: usize::try_from(if large { 64 } else { dice.within(2, 16) }).unwrap_or(8),
            pool: usize::try_from(dice.within(2_000, 20_000)).unwrap_or(8_000),
            tags: dice.chance(700),
            refuse: dice.chance(400),
            max_sessions: usize::try_from(if dice.chance(300) { dice.within(1, 8) } else { 10_000 }).unwrap_or(1),
            side_queue: usize::try_from(if dice.chance(300) { dice.within(1, 4) } else { 4_096 }).unwrap_or(1),
            faults,
        }
    }
}

fn client(seed: u64, number: u64, names: u64) -> Client {
    let mut dice = Dice::new(seed, 1_000 + number);
    let mut at_ms = dice.below(LAST_ARRIVAL_MS / 2);
    let turns = dice.within(1, 12);
    let ttl_ms = dice.within(300, 8_000);
    let leaves = dice.within(0, 400);
    let tells_each_turn = dice.chance(200);
    let steps = (0..turns)
        .map(|turn| {
            at_ms += match dice.below(10) {
                0..3 => dice.below(30),
                3..8 => dice.below(2_000),
                8 => ttl_ms.saturating_sub(20) + dice.below(60),
                _ => ttl_ms + dice.below(2_000),
            };
            let action = match dice.below(20) {
                _ if turn == 0 && dice.chance(850) => SessionAction::Open,
                _ if tells_each_turn => SessionAction::Open,
                0 => SessionAction::Open,
                1 => SessionAction::Bind,
                2 => SessionAction::Close,
                3 if dice.chance(300) => SessionAction::Release,
                _ if turn + 1 == turns && dice.chance(700) => SessionAction::Close,
                _ => SessionAction::None,
            };
            Step {
                at_ms: at_ms.min(LAST_ARRIVAL_MS),
                action,
                tokens: usize::try_from(dice.within(1, 200)).unwrap_or(1),
                output: usize::try_from(dice.within(1, 12)).unwrap_or(1),
                leaves_after_ms: dice.chance(leaves).then(|| dice.below(900)),
            }
        })
        .collect();
    Client { tenant: dice.below(3), text: format!("s{}", dice.below(names)), deltas: dice.chance(750), ttl_ms, steps }
}
