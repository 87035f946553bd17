//! The decisions of Turnstile: turns, identity, prefix index, cost, sessions, queue.
//!
//! Everything here is pure: no IO, no clock of its own (time is a `now_ms` argument, milliseconds since process start),
//! no threads, no async. The same input gives the same output, so tests, replay and simulation run the shipped code.

#![forbid(unsafe_code)]

pub mod body;
pub mod complaint;
pub mod cost;
pub mod decision;
pub mod facts;
pub mod hints;
pub mod identity;
pub mod ids;
pub mod index;
pub mod journal;
pub mod observe;
pub mod prefill;
pub mod prefix;
pub mod queue;
pub mod reply;
pub mod retry;
pub mod route;
pub mod session;
pub mod snapshot;
pub mod steering;
pub mod turn;
pub mod worker;
