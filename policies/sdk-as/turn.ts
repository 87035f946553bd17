// What a policy may know about a turn.

import { callFunction, getHeader, getProperty } from "./abi";

/** Whether a worker takes turns. States that are not known here are read as Starting. */
export enum State { Ready, Draining, Unhealthy, Starting }

/** A candidate, as the gateway saw it when the turn was dispatched. */
export class Worker {
  /** Names the worker in decisions; the same as long as the gateway runs. */
  index: u32 = 0;
  state: State = State.Ready;
  /** Bits; see canTag and its neighbours. */
  capabilities: u32 = 0;
  /** Requests of this gateway in flight. */
  inFlight: u32 = 0;
  /** Requests running there, as it reports. */
  running: u32 = 0;
  /** Requests waiting there, as it reports. */
  waiting: u32 = 0;
  /** Most that it runs; 0: not known. */
  maxRunning: u32 = 0;
  /** Bits; see isBound and its neighbours. */
  flags: u32 = 0;
  /** Prompt tokens to be prefilled for the requests waiting there. */
  waitingUncachedTokens: u64 = 0;
  kvUsedTokens: u64 = 0;
  /** 0: not known. */
  kvCapacityTokens: u64 = 0;
  /** Tokens of this turn's prompt that are probably cached there. */
  cachedTokens: u64 = 0;
  prefillTokensPerS: f64 = 0;
  /** Average time to first token. */
  ttftMs: f64 = 0;
  /** Average time between tokens. */
  itlMs: f64 = 0;
  /** Uncached tokens of our turns there that have not answered yet. */
  pendingPrefillTokens: u64 = 0;
  /** Output tokens expected of our turns in flight there. */
  expectedDecodeTokens: u64 = 0;

  /** Ready and not excluded for this turn. */
  get isCandidate(): bool { return this.state == State.Ready && !this.isExcluded; }
  /** It holds the turn's session. */
  get isBound(): bool { return (this.flags & 1) != 0; }
  /** It would queue another turn. */
  get isAtLimit(): bool { return (this.flags & 2) != 0; }
  /** It is not to be used for this turn. */
  get isExcluded(): bool { return (this.flags & 4) != 0; }
  /** It keeps sessions by a tag. */
  get canTag(): bool { return (this.capabilities & 1) != 0; }
  /** It keeps streaming sessions. */
  get canStream(): bool { return (this.capabilities & 2) != 0; }
  /** It schedules by priority. */
  get takesPriority(): bool { return (this.capabilities & 4) != 0; }
}

const TABLE_VERSION: u32 = 1;
const HEADER_BYTES: u32 = 16;
const RECORD_BYTES: u32 = 104;

/** Reads a table of workers; a table that cannot be read has none. */
function parseTable(table: ArrayBuffer | null): Worker[] {
  const workers: Worker[] = [];
  if (table === null || <u32>table.byteLength < HEADER_BYTES) return workers;
  const at = changetype<usize>(table);
  if (load<u32>(at) != TABLE_VERSION) return workers;
  // Records may grow, so the size is the header's.
  const size = load<u32>(at, 4);
  const count = load<u32>(at, 8);
  if (size < RECORD_BYTES || <u64>table.byteLength < <u64>HEADER_BYTES + <u64>size * <u64>count) return workers;
  for (let i: u32 = 0; i < count; i++) {
    const record = at + HEADER_BYTES + i * size;
    const worker = new Worker();
    worker.index = load<u32>(record);
    worker.state = <State>min<u32>(load<u32>(record, 4), <u32>State.Starting);
    worker.capabilities = load<u32>(record, 8);
    worker.inFlight = load<u32>(record, 12);
    worker.running = load<u32>(record, 16);
    worker.waiting = load<u32>(record, 20);
    worker.maxRunning = load<u32>(record, 24);
    worker.flags = load<u32>(record, 28);
    worker.waitingUncachedTokens = load<u64>(record, 32);
    worker.kvUsedTokens = load<u64>(record, 40);
    worker.kvCapacityTokens = load<u64>(record, 48);
    worker.cachedTokens = load<u64>(record, 56);
    worker.prefillTokensPerS = load<f64>(record, 64);
    worker.ttftMs = load<f64>(record, 72);
    worker.itlMs = load<f64>(record, 80);
    worker.pendingPrefillTokens = load<u64>(record, 88);
    worker.expectedDecodeTokens = load<u64>(record, 96);
    workers.push(worker);
  }
  return workers;
}

/** A decimal integer and nothing else. */
export function isInteger(text: string): bool {
  const start = text.startsWith("-") ? 1 : 0;
  // 18 digits fit into 64 bits, whatever they are.
  if (text.length == start || text.length - start > 18) return false;
  for (let i = start; i < text.length; i++) {
    const code = text.charCodeAt(i);
    if (code < 48 || code > 57) return false;
  }
  return true;
}

/** The turn being decided. Each property is one read of the host; texts that are not known are null. */
export class Turn {
  /** A fact by its name in the documentation, without "turnstile."; null if it is not there. */
  fact(name: string): string | null {
    const value = getProperty("turnstile." + name);
    return value ? String.UTF8.decode(value) : null;
  }

  /** A fact that is an integer, or `otherwise` if it is not there. */
  integer(name: string, otherwise: i64): i64 {
    const text = this.fact(name);
    return text && isInteger(text) ? I64.parseInt(text) : otherwise;
  }

  /** A fact that is a number with a fraction, or `otherwise` if it is not there. */
  number(name: string, otherwise: f64): f64 {
    const text = this.fact(name);
    if (!text) return otherwise;
    const number = parseFloat(text);
    return isNaN(number) ? otherwise : number;
  }

  /** A fact that is true or false, or `otherwise` if it is not there. */
  flag(name: string, otherwise: bool): bool {
    const text = this.fact(name);
    return text ? text == "true" : otherwise;
  }

  /** A request header, of several values the first. Write the name in lower case. */
  header(name: string): string | null {
    const value = getHeader(name);
    return value ? String.UTF8.decode(value) : null;
  }

  /** Calls a function of the gateway. */
  call(name: string, text: string): string | null {
    const result = callFunction(name, String.UTF8.encode(text));
    return result ? String.UTF8.decode(result) : null;
  }

  get model(): string | null { return this.fact("request.model"); }
  /** chat, completions, generate, responses, messages and so on. */
  get route(): string | null { return this.fact("request.route"); }
  get sessionId(): string | null { return this.fact("request.session"); }
  /** The root session of the agent's tree. */
  get tree(): string | null { return this.fact("request.tree"); }
  get parent(): string | null { return this.fact("request.parent"); }
  /** Made from the caller's credential: 16 hexadecimal digits. */
  get tenant(): string | null { return this.fact("request.tenant"); }
  get agent(): string | null { return this.fact("request.agent"); }
  /** What the client asked for its session: bind, open or close. */
  get action(): string | null { return this.fact("request.action"); }
  /** Signed; larger is more urgent; 0 if the client gave none. */
  get priority(): i64 { return this.integer("request.priority", 0); }
  /** The strict tier that the client asked for. */
  get strictPriority(): i64 { return this.integer("request.strict_priority", 0); }
  /** Output length that the client expects, tokens; -1 if it gave none. */
  get osl(): i64 { return this.integer("request.osl", -1); }
  /** Most tokens that the answer may have; -1 if the client gave none. */
  get maxTokens(): i64 { return this.integer("request.max_tokens", -1); }
  /** Estimated length of the prompt. */
  get promptTokens(): u64 { return <u64>this.integer("request.prompt_tokens", 0); }
  /** Number of this turn in its session, from 1. */
  get numberInSession(): i64 { return this.integer("request.turn", 1); }
  get stream(): bool { return this.flag("request.stream", false); }
  get speculativePrefill(): bool { return this.flag("request.speculative_prefill", false); }
  /** 0 at first, then the number of the retry. */
  get attempt(): i64 { return this.integer("attempt", 0); }
  get lastError(): string | null { return this.fact("last_error"); }

  /** The candidates, in order of their index; none outside of the phase route. */
  get workers(): Worker[] { return parseTable(getProperty("turnstile.workers.table")); }

  /** The worker that holds the turn's session. */
  get boundWorker(): Worker | null {
    const workers = parseTable(getProperty("turnstile.workers.bound"));
    return workers.length > 0 ? workers[0] : null;
  }
}
