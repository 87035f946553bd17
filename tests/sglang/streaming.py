"""Streaming sessions on `/generate`: the client sends deltas, the worker keeps the context. A second turn beside a running
one, or a close during one, can end a bare server; through the gateway neither reaches it."""

import dataclasses
import json
import threading
import time

import httpx

import sse

TIMEOUT_S = 60
KEY = {"authorization": "Bearer sk-agent-1", "x-turnstile-explain": "1"}
LONG = 400  # output tokens of a turn that others are to meet: seconds


@dataclasses.dataclass
class Answer:
    """What the client of one turn saw. Times are seconds of the monotonic clock."""

    status: int = 0
    headers: dict = None
    body: bytes = b""
    began: float = 0.0
    ended: float = 0.0
    error: str | None = None
    first: threading.Event = dataclasses.field(default_factory=threading.Event)

    @property
    def last(self):
        """The last object of the answer: of a stream, the whole text so far and what was counted."""
        if self.body.startswith(b"{"):
            return json.loads(self.body)
        return next((d for d in map(sse.data, reversed(sse.events(self.body))) if d), {})

    @property
    def meta(self):
        return self.last.get("meta_info", {})

    def outcome(self):
        if self.error:
            return self.error
        if self.status != 200:
            return f"{self.status} {self.body.decode(errors='replace')[:160]}"
        return f"200 {self.meta.get('finish_reason')} prompt {self.meta.get('prompt_tokens')} cached {self.meta.get('cached_tokens')}"

    def served(self):
        return self.status == 200 and (self.meta.get("finish_reason") or {}).get("type") in ("stop", "length")


class Conversation:
    """A streaming session of a client, through the gateway."""

    def __init__(self, rig, session):
        self._rig = rig
        self.session = session

    def body(self, text, action=None, tokens=8):
        control = {"session_id": self.session, "timeout": TIMEOUT_S}
        if action:
            control["action"] = action
        return {
            "text": text,
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
            "stream": True,
            "nvext": {"agent_hints": {"priority": 10}, "session_control": control},
        }

    def turn(self, text, action=None, tokens=8, leave_after=None):
        """One turn to its end; with `leave_after`, until so many bytes have come."""
        answer = Answer()
        self._send(answer, self.body(text, action, tokens), leave_after)
        return answer

    def start(self, text, action=None, tokens=8, leave_after=None):
        """The same on a thread. Returns the answer, which fills, and the thread."""
        answer = Answer()
        thread = threading.Thread(target=self._send, args=(answer, self.body(text, action, tokens), leave_after), daemon=True)
        thread.start()
        return answer, thread

    def start_long(self, text, action=None):
        """Starts a long turn and returns once its first bytes have come, with its recorded exchange."""
        mark = self._rig.recorder.mark()
        answer, thread = self.start(text, action, LONG)
        if not answer.first.wait(60):
            raise RuntimeError(f"a long turn of {self.session} has not begun: {answer.outcome()}")
        exchange = self._rig.recorder.since(mark, "/generate")[0]
        return answer, thread, exchange

    def _send(self, answer, body, leave_after):
        answer.began = time.monotonic()
        try:
            with (
                httpx.Client(timeout=120) as http,
                http.stream("POST", f"{self._rig.gateway.url}/generate", json=body, headers=KEY) as response,
            ):
                answer.status, answer.headers = response.status_code, response.headers
                for piece in response.iter_raw():
                    answer.body += piece
                    if response.status_code == 200:
                        answer.first.set()
                    if leave_after is not None and len(answer.body) >= leave_after:
                        break
        except httpx.HTTPError as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended = time.monotonic()


def deltas(claims, rig):
    """Open, three turns of which each sends only what is new, close."""
    mark = rig.recorder.mark()
    talk = Conversation(rig, "deltas")
    texts = ["The capital city of France", " is Paris. Now compare", " the two results."]
    answers = [talk.turn(texts[0], "open"), talk.turn(texts[1]), talk.turn(texts[2])]
    before_close = rig.recorder.since(mark, "/close_session")
    last = talk.turn(" Done.", "close")
    closes = wait_close(rig, mark, rig.recorder.since(mark, "/generate")[0])
    opens, turns = rig.recorder.since(mark, "/open_session"), rig.recorder.since(mark, "/generate")

    opened = opens[0].json if opens else {}
    claims.check(
        "one open_session, answered before the first turn is sent, with a timeout beyond ours",
        len(opens) == 1
        and opens[0].status == 200
        and opens[0].ended <= turns[0].began
        and opened.get("streaming") is True
        and opened.get("timeout", 0) > TIMEOUT_S,
        f"{opened}",
    )
    claims.check(
        "every turn names that session to the worker, with the priority and without nvext",
        all(
            e.json.get("session_params") == {"id": opened.get("session_id")}
            and e.json.get("priority") == 10
            and "session_id" not in e.json
            and b"nvext" not in e.body
            for e in turns
        ),
        f"session_params {[e.json.get('session_params') for e in turns]}, priority {[e.json.get('priority') for e in turns]}",
    )
    # What came before a turn: all earlier deltas and answers.
    new = [rig.worker.token_count(text) for text in [*texts, " Done."]]
    expected, context = [], 0
    for tokens, answer in zip(new, [*answers, last]):
        expected.append((context + tokens, max(context - 1, 0)))
        context += tokens + answer.meta.get("completion_tokens", 0)
    seen = [(a.meta.get("prompt_tokens"), a.meta.get("cached_tokens")) for a in [*answers, last]]
    claims.check(
        "each turn's prompt is the context so far and the delta; all of the context but one token is cached",
        seen[1:] == expected[1:] and seen[0][0] == expected[0][0],
        f"(prompt, cached) {seen} for deltas of {new} tokens and answers of 8",
    )
    claims.check(
        "close_session follows the last turn, with the id that was opened",
        not before_close
        and len(closes) == 1
        and closes[0].json == {"session_id": opened.get("session_id")}
        and closes[0].began >= turns[-1].last_piece,
        f"{[e.json for e in closes]}, {closes and round((closes[0].began - turns[-1].last_piece) * 1000, 1)} ms after the last bytes",
    )
    line = rig.gateway.access_line(answers[1].headers.get("x-request-id")) or {}
    claims.check(
        "the access log tells the session's mode and the cached tokens",
        (line.get("session_mode"), line.get("cached_tokens")) == ("stream", seen[1][1]),
        f"{ {k: line.get(k) for k in ('turn', 'session_mode', 'reason', 'cached_tokens', 'predicted_cached', 'ttft_ms')} }",
    )
    well(claims, rig)


def wait(claims, rig):
    """busy = "wait": turns beside a running one are held."""
    talk = Conversation(rig, "held")
    talk.turn("First.", "open")
    running, thread, first = talk.start_long(" At length.")
    mark = rig.recorder.mark()
    second = talk.turn(" Meanwhile.")
    thread.join(120)
    held = rig.recorder.since(mark, "/generate")
    line = rig.gateway.access_line(second.headers.get("x-request-id")) or {}
    claims.check(
        "a turn sent while one runs is held until that has ended, then served",
        running.served() and second.served() and len(held) == 1 and held[0].began >= first.last_piece,
        f"sent {first.last_piece - second.began:.2f} s before the end of the first, reached the worker "
        f"{(held[0].began - first.last_piece) * 1000:.1f} ms after it; session_wait_ms {line.get('session_wait_ms')}",
    )
    context = running.meta.get("prompt_tokens", 0) + running.meta.get("completion_tokens", 0)
    claims.check(
        "it finds the whole context of the one before",
        second.meta.get("prompt_tokens") == context + rig.worker.token_count(" Meanwhile.")
        and second.meta.get("cached_tokens") == context - 1,
        second.outcome(),
    )

    # Bare servers end: a refused second turn lets a third one in beside the first.
    talk = Conversation(rig, "third")
    talk.turn("First.", "open")
    running, thread, first = talk.start_long(" At length.")
    mark = rig.recorder.mark()
    others = [talk.start(" Second."), talk.start(" Third.")]
    for _, other in [*others, (None, thread)]:
        other.join(120)
    held = rig.recorder.since(mark, "/generate")
    claims.check(
        "two turns beside a running one are served one after the other",
        running.served()
        and all(a.served() for a, _ in others)
        and len(held) == 2
        and first.last_piece <= held[0].began
        and held[0].last_piece <= held[1].began,
        "; ".join(a.outcome() for a in [running, *(a for a, _ in others)]),
    )
    well(claims, rig)

    # Bare servers end: a close after a refused turn frees the KV under the running one.
    talk = Conversation(rig, "closed-meanwhile")
    mark = rig.recorder.mark()
    talk.turn("First.", "open")
    running, thread, first = talk.start_long(" At length.")
    second = talk.start(" Second.")
    closing = talk.turn(" Done.", "close")
    for other in (thread, second[1]):
        other.join(120)
    closes = wait_close(rig, mark, first)
    # If the closing turn came before the second one, that is of no session.
    end = max(e.last_piece for e in rig.recorder.since(mark, "/generate") if engine_session(e) == engine_session(first))
    claims.check(
        "a close sent while a turn runs reaches the worker after all turns have ended",
        running.served() and second[0].served() and closing.served() and len(closes) == 1 and closes[0].began >= end,
        f"{running.outcome()}; {second[0].outcome()}; closing turn {closing.outcome()}; {[e.json for e in closes]}",
    )
    well(claims, rig)

    leaving(claims, rig, served=(200,))


def leaving(claims, rig, served):
    """Clients that leave. A bare server answers 400 to a turn sent at once after that."""
    talk = Conversation(rig, f"left-{served}")
    talk.turn("First.", "open")
    before = talk.turn(" Second.")
    context = before.meta.get("prompt_tokens", 0) + before.meta.get("completion_tokens", 0)
    mark = rig.recorder.mark()
    talk.turn(" At length.", tokens=LONG, leave_after=2000)
    left = rig.recorder.since(mark, "/generate")[0]
    at_once = talk.turn(" And on.")
    if at_once.status != 200 and at_once.status in served:
        claims.note(f"the turn sent at once was refused: {at_once.outcome()}")
        rig.recorder.wait(lambda: rig.worker.load()["num_running_reqs"] == 0, 10)
        time.sleep(1)
        at_once = talk.turn(" And on.")
    claims.check(
        "after a client left in the middle, the next turn goes on from the last finished one",
        left.end == "client gone"
        and at_once.served()
        and at_once.meta.get("prompt_tokens") == context + rig.worker.token_count(" And on."),
        f"the exchange ended with: {left.end}; context {context}, next turn {at_once.outcome()}",
    )
    last = talk.turn(" Done.", "close")
    claims.check("and the session's last turn is served", last.served(), last.outcome())

    talk = Conversation(rig, f"left-closing-{served}")
    talk.turn("First.", "open")
    mark = rig.recorder.mark()
    talk.turn(" At length.", "close", tokens=LONG, leave_after=2000)
    left = rig.recorder.since(mark, "/generate")[0]
    closes = wait_close(rig, mark, left)
    claims.check(
        "a client that leaves in its closing turn: closed once, after the worker let go",
        left.end == "client gone" and len(closes) == 1 and closes[0].began >= left.ended,
        f"the exchange ended with: {left.end}; {[e.json for e in closes]}"
        + (f", {(closes[0].began - left.ended) * 1000:.0f} ms later" if closes and left.ended else ""),
    )
    well(claims, rig)


def refuse(claims, rig):
    """busy = "refuse": turns beside a running one are answered 409."""
    talk = Conversation(rig, "refused")
    talk.turn("First.", "open")
    running, thread, first = talk.start_long(" At length.")
    mark = rig.recorder.mark()
    second, third = talk.turn(" Second."), talk.turn(" Third.")
    still_running = first.end is None
    closing = talk.turn(" Done.", "close")
    thread.join(120)
    reached = rig.recorder.since(mark, "/generate")
    claims.check(
        "turns sent while one runs are refused with 409 and do not reach the worker",
        (second.status, third.status) == (409, 409) and still_running and not reached,
        f"{second.outcome()}; {third.outcome()}; requests to the worker meanwhile: {len(reached)}",
    )
    claims.check("the running turn ends as if nothing had been", running.served(), running.outcome())
    closes = closes_of(rig, mark, first)
    claims.check(
        "a close beside it does not reach the worker before its end",
        all(e.began >= first.last_piece for e in closes),
        f"closing turn: {closing.outcome()}; {len(closes)} close_session",
    )
    after = talk.turn(" After all.")
    claims.check("the session goes on after it", after.served(), after.outcome())
    last = talk.turn(" Done.", "close")
    closes = wait_close(rig, mark, first)
    claims.check("and is closed at last", last.served() and len(closes) == 1, f"{last.outcome()}; {[e.json for e in closes]}")
    well(claims, rig)
    leaving(claims, rig, served=(200, 409))


def shutdown(claims, rig):
    """The gateway closes what it opened when it stops."""
    mark = rig.recorder.mark()
    answer = Conversation(rig, "open-at-the-end").turn("First.", "open")
    opened = [e.json["session_id"] for e in rig.recorder.since(mark, "/open_session")]
    code = rig.gateway.stop(40)
    closed = [e.json["session_id"] for e in rig.recorder.since(mark, "/close_session")]
    claims.check(
        "a gateway that stops closes the sessions it opened, and ends with 0",
        answer.served() and code == 0 and opened and set(opened) <= set(closed) and len(closed) == len(set(closed)),
        f"exit code {code}, opened {opened}, closed {closed}",
    )


def safety(claims, recorder, worker):
    """Over all that the worker received: never two turns of a session at once, never a close during one."""
    turns, overlaps = {}, []
    for exchange in recorder.since(0, "/generate"):
        if session := engine_session(exchange):
            turns.setdefault(session, []).append(exchange)
    for session, exchanges in turns.items():
        for before, after in zip(exchanges, exchanges[1:]):
            if after.began < (before.last_piece or before.began):
                overlaps.append((session, before.number, after.number))
    during = [
        (close.number, turn.number)
        for close in recorder.since(0, "/close_session")
        for turn in turns.get(close.json["session_id"], [])
        if turn.began <= close.began < (turn.last_piece or turn.began)
    ]
    count = sum(map(len, turns.values()))
    claims.check("the worker never had two turns of a session at once", count and not overlaps, f"{count} turns of {len(turns)} sessions; overlaps {overlaps}")
    claims.check("the worker was never sent a close during a turn", not during, f"{len(recorder.since(0, '/close_session'))} closes; during a turn {during}")
    opened = {e.json["session_id"] for e in recorder.since(0, "/open_session") if e.status == 200}
    closed = {e.json["session_id"] for e in recorder.since(0, "/close_session")}
    claims.check("every session that was opened was closed", opened and opened <= closed, f"{len(opened)} opened, not closed: {sorted(opened - closed)}")
    claims.check("the server survived all of it", worker.is_well(), f"ready, runs a request, process {worker.pid} alive")


def bare(claims, worker):
    """For comparison: turn, second turn beside it, close, sent to the server itself. Last, because it can end it."""

    def post(path, body, first=None):
        try:
            with httpx.Client(timeout=60) as http, http.stream("POST", worker.url + path, json=body) as response:
                for _ in response.iter_raw():
                    if first:
                        first.set()
                return response.status_code
        except httpx.HTTPError as error:
            return type(error).__name__

    def turn(text, tokens, first=None):
        parameters = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"text": text, "sampling_params": parameters, "session_params": {"id": "bare"}, "stream": first is not None}
        return post("/generate", body, first)

    post("/open_session", {"capacity_of_str_len": 0, "session_id": "bare", "streaming": True, "timeout": TIMEOUT_S})
    turn("First.", 8)
    begun, outcome = threading.Event(), []
    long = threading.Thread(target=lambda: outcome.append(turn(" At length.", LONG, begun)), daemon=True)
    long.start()
    begun.wait(60)
    statuses = [turn(" Second.", 8), post("/close_session", {"session_id": "bare"})]
    long.join(60)
    code = worker.wait(30)
    end = "the server lives on" if code is None else f"the server is gone (exit code {code})"
    claims.note(f"long turn: {outcome}, second turn beside it: {statuses[0]}, close: {statuses[1]}; {end}")


def engine_session(exchange):
    """The id that a turn names to the worker; None for one without a session."""
    return ((exchange.json or {}).get("session_params") or {}).get("id")


def closes_of(rig, mark, turn):
    """The close_session requests since `mark` for the session of `turn`, a recorded exchange."""
    # A request is listed from its head on; its body may be on the way still.
    closes = rig.recorder.since(mark, "/close_session")
    return [e for e in closes if (e.json or {}).get("session_id") == engine_session(turn)]


def wait_close(rig, mark, turn, seconds=15):
    """The same once there is one, and a moment for one too many has passed."""
    rig.recorder.wait(lambda: closes_of(rig, mark, turn), seconds)
    time.sleep(0.3)
    return closes_of(rig, mark, turn)


def well(claims, rig):
    claims.check("the server is well", rig.worker.is_well(), "GET /ready 200, and a turn without a session runs")
