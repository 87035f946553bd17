"""The sequences that end a bare SGLang server with streaming sessions, sent through the gateway, which the server survives;
and sent to a server itself, which it does not."""

import threading
import time

import httpx

import streaming
from streaming import LONG, TIMEOUT_S, Conversation, wait_close

# Output tokens of a turn that must still run when the second and the third have come, sent to a server itself.
LONGER = 3 * LONG
# Seconds between the end of a client's connection and its next turn.
PAUSES = [0, 0, 0, 0.01, 0.05, 0.3]


def run(claims, rig, busy):
    """All sequences in one busy mode. `busy`: "wait" or "refuse"."""
    third_turn(claims, rig, busy)
    close_beside(claims, rig, busy)
    turn_after_disconnect(claims, rig)
    all_at_once(claims, rig, busy)
    after(claims, rig)


def third_turn(claims, rig, busy):
    """A runs, B is sent, then C."""
    talk = Conversation(rig, f"third-{busy}")
    first = talk.turn("First.", "open")
    running, thread, exchange = talk.start_long(" At length.")
    mark = rig.recorder.mark()
    others = [talk.start(" Second."), talk.start(" Third.")]
    if busy == "refuse":
        join(others)
    reached = [e for e in rig.recorder.since(mark, "/generate") if exchange.end is None]
    thread.join(120)
    join(others)
    statuses = [answer.status for answer, _ in others]
    expected = [200, 200] if busy == "wait" else [409, 409]
    claims.check(
        f"A running, B, C: A is served, B and C are answered {expected}, and none reached the server beside A",
        first.served() and running.served() and statuses == expected and not reached,
        f"A: {running.outcome()}; B: {others[0][0].outcome()}; C: {others[1][0].outcome()}",
    )
    last = talk.turn(" Done.", "close")
    claims.check("and the session goes on after it", last.served(), last.outcome())
    alive(claims, rig, "A running, B, C")


def close_beside(claims, rig, busy):
    """A runs, B is sent, then a close."""
    talk = Conversation(rig, f"close-{busy}")
    talk.turn("First.", "open")
    mark = rig.recorder.mark()
    running, thread, exchange = talk.start_long(" At length.")
    others = [talk.start(" Second."), talk.start(" Done.", "close")]
    thread.join(120)
    join(others)
    if busy == "refuse":
        # Refused like any other turn, so it is sent again.
        others.append((talk.turn(" Done.", "close"), None))
    closes = wait_close(rig, mark, exchange)
    claims.check(
        "A running, B, close: A is served, and the one close comes after its end",
        running.served() and others[-1][0].served() and len(closes) == 1 and closes[0].began >= exchange.last_piece,
        f"A: {running.outcome()}; " + "; ".join(answer.outcome() for answer, _ in others)
        + (f"; closed {(closes[0].began - exchange.last_piece) * 1000:.0f} ms after A's last bytes" if closes else ""),
    )
    alive(claims, rig, "A running, B, close")


def turn_after_disconnect(claims, rig):
    """The client of A hangs up, and sends its next turn at once."""
    talk = Conversation(rig, "disconnect")
    talk.turn("First.", "open")
    outcomes = []
    for pause in PAUSES:
        talk.turn(" At length.", tokens=LONG, leave_after=1500)
        time.sleep(pause)
        outcomes.append(talk.turn(" Next."))
    claims.check(
        "A's client disconnects, the next turn comes at once: it is served, each time",
        all(answer.served() for answer in outcomes),
        "; ".join(f"{pause} s later: {answer.outcome()}" for pause, answer in zip(PAUSES, outcomes)),
    )
    notes = [answer.headers.get("x-turnstile-session-note", "") for answer in outcomes if answer.headers]
    claims.check(
        "and the client is told that the turn that was cut may be missing",
        len(notes) == len(PAUSES) and all(note.startswith("context incomplete") for note in notes),
        f"{sorted(set(notes))}",
    )
    mark = rig.recorder.mark()
    talk.turn(" At length.", tokens=LONG, leave_after=1500)
    closing = talk.turn(" Done.", "close")
    turns = rig.recorder.since(mark, "/generate")
    closes = wait_close(rig, mark, turns[0])
    claims.check(
        "the same with a closing turn: served, and closed once after it",
        closing.served() and len(closes) == 1 and closes[0].began >= turns[-1].last_piece,
        closing.outcome(),
    )
    alive(claims, rig, "disconnect, next turn")


def all_at_once(claims, rig, busy):
    """Eight turns and a close on one session at once, some of whose clients hang up."""
    talk = Conversation(rig, f"storm-{busy}")
    talk.turn("First.", "open")
    begun = [talk.start(f" Turn {n}.", tokens=120, leave_after=400 if n % 3 == 0 else None) for n in range(8)]
    begun.append(talk.start(" Done.", "close"))
    join(begun)
    answers = [answer for answer, _ in begun]
    allowed = {200} if busy == "wait" else {200, 409}
    claims.check(
        "eight turns and a close at once, some of whose clients hang up",
        all(answer.status in allowed for answer in answers) and any(answer.status == 200 for answer in answers),
        f"{[answer.status for answer in answers]}",
    )
    talk.turn(" Done.", "close")
    alive(claims, rig, "eight turns and a close at once")


def after(claims, rig):
    """The server serves others as if nothing had been."""
    talk = Conversation(rig, "afterwards")
    answers = [talk.turn("Hello.", "open"), talk.turn(" And on."), talk.turn(" Done.", "close")]
    claims.check("another session is served afterwards", all(a.served() for a in answers), answers[-1].outcome())
    gone = rig.recorder.wait(lambda: not rig.gateway.sessions(), 90)
    claims.check("and no session is left in the gateway", gone, f"{len(rig.gateway.sessions())} left")


def alive(claims, rig, what):
    claims.check(f"the server survives: {what}", rig.worker.is_well(), f"ready, runs a request, process {rig.worker.pid} alive")


def join(begun):
    for _, thread in begun:
        if thread:
            thread.join(120)


def bare(claims, worker, sequence):
    """One sequence sent to a server itself, which it ends. `sequence`: "turn" or "close", what follows A and B."""
    session = {"id": f"bare-{sequence}"}

    def post(path, body, first=None):
        try:
            with httpx.Client(timeout=300) as http, http.stream("POST", worker.url + path, json=body) as response:
                for _ in response.iter_raw():
                    if first:
                        first.set()
                return response.status_code
        except httpx.HTTPError as error:
            return type(error).__name__

    def turn(text, tokens, first=None):
        parameters = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"text": text, "sampling_params": parameters, "session_params": session, "stream": first is not None}
        return post("/generate", body, first)

    post("/open_session", {"capacity_of_str_len": 0, "session_id": session["id"], "streaming": True, "timeout": TIMEOUT_S})
    turn("First.", 8)
    begun, outcome = threading.Event(), []
    long = threading.Thread(target=lambda: outcome.append(turn(" At length.", LONGER, begun)), daemon=True)
    long.start()
    begun.wait(60)
    second = turn(" Second.", 8)
    third = turn(" Third.", 8) if sequence == "turn" else post("/close_session", {"session_id": session["id"]})
    long.join(300)  # the damage shows when the first turn ends
    code = worker.wait(30)
    # Where the third turn does not end the server, it has still run beside A in the same KV.
    mixed = sequence == "turn" and third == 200
    claims.check(
        f"sent to a server itself, A running, B refused, {sequence}: it is gone" + (", or ran both at once" if sequence == "turn" else ""),
        second == 400 and (code is not None or mixed),
        f"A: {outcome}, B: {second}, {sequence}: {third}; " + ("it lives on" if code is None else f"exit code {code}"),
    )


safety = streaming.safety
