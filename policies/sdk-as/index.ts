// Turnstile policies in AssemblyScript: facts, workers, decisions, options and log lines as types. It speaks the
// Proxy-Wasm ABI itself and needs nothing but the compiler.

export { Decision, SessionAction, SessionMode } from "./decision";
export { Event, EventKind } from "./event";
export { Options } from "./options";
export { Counter, Level, log, Policy, register } from "./policy";
export { State, Turn, Worker } from "./turn";
