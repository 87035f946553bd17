"""Sessions by tag: chat with the full history; the worker is told priority and session, and the end of the session."""

import threading
import time

import sse
from agent import Agent

TIMEOUT_S = 60
PRIORITY = 10


def nvext(session, action="open", **hints):
    return {
        "agent_hints": {"priority": PRIORITY, "strict_priority": 1, "osl": 80, **hints},
        "session_control": {"session_id": session, "action": action, "timeout": TIMEOUT_S},
    }


def run(claims, rig):
    conversation(claims, rig)
    apart(claims, rig)
    client_gone(claims, rig)


def conversation(claims, rig):
    """Four turns of one session, the last one closing it."""
    mark = rig.recorder.mark()
    agent = Agent(rig)
    turns = [
        agent.turn("Compare two sorting algorithms.", nvext("s1")),
        agent.turn("Now write a short summary.", nvext("s1"), stream_options={"include_usage": True}),
        agent.turn("Name the functions and their parameters.", nvext("s1")),
    ]
    open_during = rig.gateway.sessions()
    before_close = rig.recorder.since(mark, "/close_session")
    turns.append(agent.turn("That is all.", nvext("s1", "close")))
    closes = wait_close(rig, mark)
    received = [turn.exchange for turn in turns]

    claims.check(
        "every turn is answered 200 and written to its end",
        all(t.response.status == 200 and t.chunks[-1 if not t.chunks[-1].usage else -2].choices for t in turns)
        and all(t.exchange.end == "complete" for t in turns),
        f"{[t.response.status for t in turns]}, {[len(t.text) for t in turns]} characters",
    )
    claims.check(
        "the worker receives the priority",
        all(e.json.get("priority") == PRIORITY for e in received),
        f"priority {[e.json.get('priority') for e in received]}",
    )
    ids = {e.json.get("session_id") for e in received}
    claims.check("the worker receives one session id on every turn", len(ids) == 1 and all(ids), f"session_id {ids}")
    claims.check(
        "the worker receives no nvext, and no header of ours",
        all(b"nvext" not in e.body and b"agent_hints" not in e.body for e in received)
        and not any("turnstile" in name.lower() or "dynamo" in name.lower() for e in received for name, _ in e.headers),
        f"members of the last body: {sorted(received[-1].json)}",
    )
    claims.check(
        "the messages reach the worker as the client sent them",
        received[-1].json["messages"] == agent.messages[:-1],
        f"{len(agent.messages) - 1} messages",
    )
    cached, prompts = [t.cached for t in turns], [t.usage.get("prompt_tokens") for t in turns]
    claims.check(
        "cached tokens grow with the turns: each has at least the prompt of the one before",
        all(later >= prompt - 1 for later, prompt in zip(cached[1:], prompts)) and cached == sorted(set(cached)),
        f"prompt tokens {prompts}, of these cached {cached}",
    )

    asked, unasked = turns[1], [turns[0], *turns[2:]]
    claims.check(
        "a client that did not ask for usage gets none, and no sglext",
        all(c.usage is None and "sglext" not in (c.model_extra or {}) for t in unasked for c in t.chunks)
        and not any(b"sglext" in t.response.body or b'"usage":{' in t.response.body for t in unasked),
        f"the worker sent usage in {sum(b'prompt_tokens' in t.exchange.answer for t in unasked)} of {len(unasked)} streams",
    )
    usage = asked.chunks[-1].usage
    claims.check(
        "a client that asked for usage gets the worker's",
        usage is not None
        and usage.prompt_tokens_details is not None
        and (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (prompts[1], cached[1]),
        f"{usage and usage.model_dump(exclude_none=True)}",
    )
    claims.check(
        "the rest of every stream is the worker's, byte for byte",
        all(sse.split_added(t.exchange.answer, t.response.body)[0] for t in turns),
        f"worker sent {[len(t.exchange.answer) for t in turns]} bytes, client received {[len(t.response.body) for t in turns]}",
    )

    claims.check("nothing is closed before the close", not before_close, f"{len(before_close)} close_session")
    last = received[-1]
    claims.check(
        "close_session follows the last stream, once, with the same id",
        len(closes) == 1 and closes[0].json == {"session_id": last.json.get("session_id")} and closes[0].began >= last.last_piece,
        f"{[e.json for e in closes]}, {closes and round((closes[0].began - last.last_piece) * 1000, 1)} ms after the stream's last bytes",
    )
    claims.check(
        "the admin listener lists the session while it is open, and not after",
        [(s["mode"], s["worker"], s["turns"]) for s in open_during] == [("tag", "worker", 3)] and not rig.gateway.sessions(),
        f"{open_during}",
    )

    lines = [rig.gateway.access_line(t.request_id) for t in turns]
    claims.check(
        "the access log tells worker, session mode, priority and the worker's cached tokens",
        all(lines)
        and [line.get("cached_tokens") for line in lines] == cached
        and all(
            (line.get("worker"), line.get("session_mode"), line.get("engine_priority"), line.get("status"))
            == ("worker", "tag", PRIORITY, 200)
            for line in lines
        ),
        f"{[{k: line.get(k) for k in ('turn', 'worker', 'session_mode', 'reason', 'engine_priority', 'predicted_cached', 'cached_tokens', 'ttft_ms', 'status', 'end')} for line in lines if line]}",
    )
    explained = {k: v for k, v in turns[2].response.headers.items() if k.startswith("x-turnstile-")}
    claims.check(
        "the explain headers name worker, reason, wait, estimate and session",
        explained.get("x-turnstile-worker") == "worker"
        and explained.get("x-turnstile-session") == "tag"
        and {"x-turnstile-reason", "x-turnstile-queue-wait-ms", "x-turnstile-cached-estimate"} <= set(explained),
        f"{explained}",
    )
    claims.check(
        "from the second turn on, the gateway predicts cached tokens: at least half of what there is, not more than the prompt",
        all(
            line and tokens / 2 <= (line.get("predicted_cached") or 0) <= prompt
            for line, tokens, prompt in list(zip(lines, cached, prompts))[1:]
        ),
        f"predicted {[line and line.get('predicted_cached') for line in lines]}, reported {cached}",
    )


def apart(claims, rig):
    """The same id from two credentials, two ids from one, and an id in a header."""
    first, second = Agent(rig, key="sk-agent-1"), Agent(rig, key="sk-agent-2")
    mark = rig.recorder.mark()
    turns = [
        first.turn("One.", nvext("shared")),
        second.turn("One.", nvext("shared")),
        Agent(rig).turn("One.", nvext("other")),
    ]
    ids = [t.exchange.json.get("session_id") for t in turns]
    claims.check(
        "one session id from two credentials is two sessions, two ids from one are two",
        len(set(ids)) == 3 and all(ids),
        f"{ids}",
    )
    for agent, session in ((first, "shared"), (second, "shared"), (Agent(rig), "other")):
        agent.turn("Done.", nvext(session, "close"))
    closes = wait_close(rig, mark, 3)
    claims.check(
        "each close ends its own session",
        sorted(e.json["session_id"] for e in closes) == sorted(ids),
        f"{len(closes)} close_session",
    )
    bound = Agent(rig).turn("One.", {"session_control": {"session_id": "bound", "action": "bind"}})
    line = rig.gateway.access_line(bound.request_id) or {}
    claims.check(
        "bind stays in the gateway: the worker is told of no session",
        "session_id" not in bound.exchange.json and line.get("session_mode") == "affinity",
        f"session mode {line.get('session_mode')}, the worker's session_id {bound.exchange.json.get('session_id')}",
    )


def client_gone(claims, rig):
    """The client hangs up in its closing turn."""
    agent = Agent(rig)
    mark = rig.recorder.mark()
    agent.turn("One.", nvext("leaver"))
    left = agent.turn("Write at length.", nvext("leaver", "close"), regex="[a-z ]{3000}", max_tokens=2500, leave_after=3)
    ended = rig.recorder.wait(lambda: left.exchange.end, 10)
    closes = wait_close(rig, mark)
    idle = rig.recorder.wait(lambda: rig.worker.load()["num_running_reqs"] == 0, 10)
    claims.check(
        "a client that leaves ends the worker's work",
        ended == "client gone" and idle,
        f"the exchange ended with: {ended}; the worker had sent {len(sse.events(left.exchange.answer))} events of some 700",
    )
    claims.check(
        "its close is sent all the same, after the end",
        len(closes) == 1 and closes[0].json["session_id"] == left.exchange.json["session_id"] and closes[0].began >= left.exchange.ended,
        f"{[e.json for e in closes]}",
    )


def overtaking(claims, rig):
    """A worker that is given one turn at a time: of those that wait, the most urgent goes next."""
    begun = rig.recorder.mark()
    priorities = {"first": 0, "ordinary": 0, "urgent": 10, "background": -10, "most urgent": 20}
    agents = {name: Agent(rig) for name in priorities}
    threads = []

    def send(name):
        # The first one is long enough for the others to arrive while it runs.
        length, tokens = (9000, 3000) if name == "first" else (80, 200)
        hints = {"agent_hints": {"priority": priorities[name]}}
        agents[name].turn(name, hints, regex=f"[a-z ]{{{length}}}", max_tokens=tokens)

    for waiting, name in enumerate(priorities):
        thread = threading.Thread(target=send, args=(name,), daemon=True)
        thread.start()
        threads.append(thread)
        # Arrived, before the next one is sent.
        if waiting == 0:
            arrived = rig.recorder.wait(lambda: rig.recorder.since(begun, "/v1/chat/completions"), 20)
        else:
            arrived = rig.recorder.wait(lambda: rig.gateway.queue_depth() == waiting, 20)
        if not arrived:
            raise RuntimeError(f"{name!r} has not arrived: queue depth {rig.gateway.queue_depth()}")
    for thread in threads:
        thread.join(120)
    received = rig.recorder.since(begun, "/v1/chat/completions")
    order = [e.json["messages"][-1]["content"] for e in received]
    claims.check(
        "of the turns that wait for a busy worker the more urgent go first, negative priorities last",
        order == ["first", "most urgent", "urgent", "ordinary", "background"],
        f"sent {list(priorities)}, the worker received {order}",
    )
    claims.check(
        "and the worker is told their priorities, as signed",
        [e.json.get("priority") for e in received] == [priorities[name] for name in order],
        f"{[e.json.get('priority') for e in received]}",
    )
    # The log's writer lets lines gather for a moment.
    deadline = time.monotonic() + 5
    while len(lines := rig.gateway.access_lines()) < len(order) and time.monotonic() < deadline:
        time.sleep(0.02)
    claims.check(
        "the access log tells how long each one waited",
        len(lines) == len(order) and sum(line["queue_ms"] > 0 for line in lines) == len(order) - 1,
        f"queue_ms {[line['queue_ms'] for line in lines]}, in the order of their ends",
    )


def shutdown(claims, rig):
    """The gateway closes what it opened when it stops."""
    turn = Agent(rig).turn("One.", nvext("open-at-the-end"))
    mark = rig.recorder.mark()
    code = rig.gateway.stop(40)
    closes = rig.recorder.since(mark, "/close_session")
    claims.check(
        "a gateway that stops closes the sessions it opened, and ends with 0",
        code == 0 and turn.exchange.json["session_id"] in [e.json["session_id"] for e in closes],
        f"exit code {code}, closed {[e.json['session_id'] for e in closes]}",
    )


def wait_close(rig, mark, count=1):
    """The close_session requests since `mark`, once there are `count` of them and a moment for one too many has passed."""
    rig.recorder.wait(lambda: len(rig.recorder.since(mark, "/close_session")) >= count, 10)
    time.sleep(0.5)
    return rig.recorder.since(mark, "/close_session")
