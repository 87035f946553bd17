// What a policy is, and how it is made and asked.

import { count, defineCounter, getCallData, getConfiguration, log as writeLog } from "./abi";
import { Decision } from "./decision";
import { Event } from "./event";
import { Options } from "./options";
import { Turn } from "./turn";

/** A policy. It lives as long as the plugin's instance, so it may keep what it learned in its fields. */
export abstract class Policy {
  /** Writes into `decision` what it wants; what it leaves out stays as earlier plugins or the built-in rule have it. */
  abstract decide(turn: Turn, decision: Decision): void;

  /**
   * Told of something that happened in the answer, if the plugin's option `events` names its kind. The facts of the turn can be
   * read; it is too late for decisions.
   */
  onEvent(_event: Event, _turn: Turn): void {}

  /** Called at the end of a turn, however it ended. */
  finished(_turn: Turn): void {}
}

/** Severity of a log line. */
export enum Level { Trace, Debug, Info, Warn, Error, Critical }

/** Writes a log line. */
export function log(level: Level, line: string): void {
  writeLog(level, line);
}

/** A counter of the policy. Use snake_case; the gateway adds the plugin's name. */
export class Counter {
  private id: u32;

  constructor(name: string) {
    this.id = defineCounter(name);
  }

  add(by: i64): void {
    count(this.id, by);
  }
}

let configure: ((options: Options) => Policy) | null = null;
let policy: Policy | null = null;

/** Names the function that makes the policy from its options. Call it once, at the top level of the entry file. */
export function register(make: (options: Options) => Policy): void {
  configure = make;
}

/** Makes the policy. The old one stays if the options are refused. */
export function onConfigure(size: u32): bool {
  const make = configure;
  if (make === null) {
    log(Level.Error, "the policy registers nothing: call register at the top level of the entry file");
    return false;
  }
  const options = new Options(String.UTF8.decode(getConfiguration(size)));
  const made = make(options);
  if (!options.accepted()) {
    log(Level.Error, options.wrong);
    return false;
  }
  policy = made;
  return true;
}

/** Asks the policy. */
export function onDecide(): void {
  const asked = policy;
  if (asked !== null) {
    const decision = new Decision();
    asked.decide(new Turn(), decision);
    decision.write();
  }
}

/** Tells the policy of an event; one that is not known here is none. */
export function onEvent(id: u32, size: u32): void {
  const asked = policy;
  if (asked === null || id != Event.FUNCTION) return;
  const event = Event.read(String.UTF8.decode(getCallData(size)));
  if (event !== null) asked.onEvent(event, new Turn());
}

/** Tells the policy that a turn has ended. */
export function onFinished(): void {
  const asked = policy;
  if (asked !== null) asked.finished(new Turn());
}
