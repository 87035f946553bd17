// What a policy is told of an answer while it comes.

import { Members } from "./options";

/** What an event is about. */
export enum EventKind {
  /** A stream has brought its first token. Comes before everything else. */
  FirstToken,
  /** A tool is called; `number` and `name` say which. */
  ToolCall,
  /** Generation has ended; `reason` says why. */
  Finish,
  /** The answer has ended; its tokens, as far as the worker told them. */
  Usage,
  /** The turn has ended; `outcome` and `status` say how. Comes last. */
  End,
}

const NAMES: string[] = ["first_token", "tool_call", "finish", "usage", "end"];

/** Something that happened in the answer to a turn. */
export class Event {
  /** The id of the gateway's function call that brings events. */
  static readonly FUNCTION: u32 = 1;

  kind: EventKind = EventKind.FirstToken;
  /** When, from the arrival of the request. */
  atMs: i64 = 0;
  /** Place of a tool call among those of the answer, from 0. */
  number: i64 = 0;
  /** Name of the tool that is called. */
  name: string = "";
  /** Why generation ended, such as `stop`, `length` or `tool_calls`. */
  reason: string = "";
  /** Tokens of the prompt, cached ones included; -1 if the worker did not tell. */
  promptTokens: i64 = -1;
  /** Tokens generated; -1 if the worker did not tell. */
  completionTokens: i64 = -1;
  /** Tokens of the prompt that were cached; -1 if the worker did not tell. */
  cachedTokens: i64 = -1;
  /** How the turn ended, as in the access log: `finished`, `client_gone`, `cut`, `timeout`, `refused` and others. */
  outcome: string = "";
  /** HTTP status that the client got. */
  status: i64 = 0;
  /** Events that were not told because there were too many of their kind. */
  leftOut: i64 = 0;

  /** An event as the gateway writes it; null for one that is not known here. */
  static read(json: string): Event | null {
    const members = new Members(json);
    const kind = NAMES.indexOf(members.text("event"));
    if (kind < 0) return null;
    const event = new Event();
    event.kind = <EventKind>kind;
    event.atMs = members.integer("at_ms", 0);
    event.number = members.integer("number", 0);
    event.name = members.text("name");
    event.reason = members.text("reason");
    event.promptTokens = members.integer("prompt_tokens", -1);
    event.completionTokens = members.integer("completion_tokens", -1);
    event.cachedTokens = members.integer("cached_tokens", -1);
    event.outcome = members.text("outcome");
    event.status = members.integer("status", 0);
    event.leftOut = members.integer("left_out", 0);
    return event;
  }
}
