// What a policy decides, and how it is written to the host.

import { callFunction, setProperty } from "./abi";

/** What happens to a turn's session. */
export enum SessionAction { Bind, Open, Close, Release, Nothing }
/** How the engine takes part in a session. */
export enum SessionMode { Affinity, Tag, Stream, Auto }

const ACTIONS: string[] = ["bind", "open", "close", "release", "none"];
const MODES: string[] = ["affinity", "tag", "stream", "auto"];

function workerName(index: u32): string {
  return "#" + index.toString();
}

/** Milliseconds as seconds with three decimals. */
function seconds(ms: i64): string {
  const size: u64 = ms < 0 ? 0 - <u64>ms : <u64>ms;
  return (ms < 0 ? "-" : "") + (size / 1000).toString() + "." + (size % 1000).toString().padStart(3, "0");
}

/** Collects what is decided. A value that is wrong is dropped and counted by the gateway. */
export class Decision {
  private names: string[] = [];
  private values: string[] = [];

  /** Decides by a name in the documentation, without "turnstile.". */
  set(name: string, value: string): void {
    this.names.push("turnstile." + name);
    this.values.push(value);
  }

  /** The worker to send the turn to. */
  target(worker: u32): void { this.set("route.target", workerName(worker)); }
  /** Workers to try next, best first, if the target fails before it answered. */
  fallbacks(workers: u32[]): void { this.setWorkers("route.fallbacks", workers); }
  /** Workers not to use for this turn. Replaces what earlier plugins excluded. */
  exclude(workers: u32[]): void { this.setWorkers("route.exclude", workers); }
  /** Cost of workers in whole ms, lower is better: for the decision log and for policies that follow. */
  scores(workers: u32[], costsMs: i64[]): void {
    let text = "";
    for (let i = 0, count = min(workers.length, costsMs.length); i < count; i++) {
      text += (i > 0 ? ',"' : '"') + workerName(workers[i]) + '":' + costsMs[i].toString();
    }
    if (text.length > 0) this.set("route.scores", "{" + text + "}");
  }
  /** Why, in a few words, for the decision log. */
  reason(text: string): void { this.set("route.reason", text); }
  /** Strict tier in the queue; higher goes first, always. */
  tier(tier: u32): void { this.set("queue.tier", tier.toString()); }
  /** Head start in the queue, ms of arrival time; negative lets others pass. */
  headStartMs(ms: i64): void { this.set("queue.priority", seconds(ms)); }
  /** Give up waiting in the queue after this many ms. */
  deadlineMs(ms: u32): void { this.set("queue.deadline_ms", ms.toString()); }
  /** Turns of one flow share one fair part of the fleet. */
  flow(flow: string): void { this.set("queue.flow", flow); }
  /** What happens to the session. */
  session(action: SessionAction): void { this.set("session.action", ACTIONS[action]); }
  /** The session's id, instead of the client's. */
  sessionKey(key: string): void { this.set("session.key", key); }
  /** The session's idle timeout, ms from the end of a turn. */
  sessionTtlMs(ms: i64): void { this.set("session.ttl_s", seconds(ms)); }
  /** How the engine takes part in the session. */
  sessionMode(mode: SessionMode): void { this.set("session.mode", MODES[mode]); }
  /** Whether the next turn is warmed after this one. */
  prefill(on: bool): void { this.set("prefill", on ? "on" : "off"); }
  /** The priority sent to the worker. */
  enginePriority(priority: i64): void { this.set("engine.priority", priority.toString()); }
  /** No priority is sent to the worker, even if the client gave one. */
  noEnginePriority(): void { this.set("engine.priority", "none"); }
  /** A note in the decision log, under a name of letters, digits, "_", "-" and ".". */
  note(name: string, text: string): void { this.set("log." + name, text); }

  private setWorkers(name: string, workers: u32[]): void {
    if (workers.length == 0) return;
    let text = "";
    for (let i = 0; i < workers.length; i++) text += (i > 0 ? "," : "") + workerName(workers[i]);
    this.set(name, text);
  }

  /** Writes everything in one call, or one by one where the host has no such function. */
  write(): void {
    const texts: ArrayBuffer[] = [];
    let size = 0;
    for (let i = 0; i < this.names.length; i++) {
      texts.push(String.UTF8.encode(this.names[i]));
      texts.push(String.UTF8.encode(this.values[i]));
    }
    for (let i = 0; i < texts.length; i++) size += 4 + texts[i].byteLength;
    if (size == 0) return;
    const batch = new ArrayBuffer(size);
    let at = changetype<usize>(batch);
    for (let i = 0; i < texts.length; i++) {
      store<u32>(at, texts[i].byteLength);
      memory.copy(at + 4, changetype<usize>(texts[i]), texts[i].byteLength);
      at += 4 + texts[i].byteLength;
    }
    if (callFunction("turnstile.write", batch) !== null) return;
    for (let i = 0; i < this.names.length; i++) setProperty(this.names[i], texts[2 * i + 1]);
  }
}
