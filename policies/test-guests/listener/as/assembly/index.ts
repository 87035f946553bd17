// Logs every event that it is told of. The same in every language of the SDKs.

import { Decision, Event, EventKind, Level, log, Options, Policy, register, Turn } from "../turnstile";

// The functions that the gateway calls.
export * from "../turnstile/exports";

class Listener extends Policy {
  decide(_turn: Turn, _decision: Decision): void {}

  onEvent(event: Event, turn: Turn): void {
    let what = "unknown";
    if (event.kind == EventKind.FirstToken) what = "first_token";
    if (event.kind == EventKind.ToolCall) what = "tool_call " + event.number.toString() + " " + event.name;
    if (event.kind == EventKind.Finish) what = "finish " + event.reason;
    if (event.kind == EventKind.Usage) {
      what = "usage " + event.promptTokens.toString() + " " + event.completionTokens.toString() + " " +
        event.cachedTokens.toString();
    }
    if (event.kind == EventKind.End) {
      what = "end " + event.outcome + " " + event.status.toString() + " " + event.leftOut.toString();
    }
    const model = turn.model;
    log(Level.Info, (model === null ? "" : model) + " " + what);
  }
}

register((_options: Options): Policy => new Listener());
