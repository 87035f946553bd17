"""Speculative prefill: with a template that drops reasoning, what a worker cached while it wrote an answer is no prefix of
the next turn. The gateway sends it that prefix while the agent is busy with its tools."""

import time

import httpx

from agent import NO_GRAMMAR_DELAY, Agent
from rig import MODEL

LOWEST = -100  # prefill.engine_priority
THINKING = "<think>[a-z ]{60}</think>"
CALL = r'<tool_call>\n\{"name": "search", "arguments": \{"query": "[a-z ]{100}"\}\}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the web",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    }
]


def run(claims, rig):
    pair(claims, rig, "reasoning parsed apart by the worker", THINKING + "[a-z ]{160}", {})
    # Servers without --reasoning-parser leave it in the text: the client sends it back, and the template drops it.
    pair(claims, rig, "reasoning in the text", THINKING + "[a-z ]{160}", {"separate_reasoning": False})
    pair(claims, rig, "a tool call", THINKING + CALL, {}, tools=TOOLS)
    never_for_aborted(claims, rig)
    hangs_up_after_done(claims, rig)


def pair(claims, rig, title, regex, extra, tools=None):
    """The same conversation, its text unique, once with the hint and once without."""
    seen = {}
    for hinted in (False, True):
        agent = Agent(rig)
        session = f"{title}, {hinted}"
        nvext = {
            "agent_hints": {"priority": 5, "speculative_prefill": hinted},
            "session_control": {"session_id": session, "action": "open", "timeout": 60},
        }
        arguments = {"tools": tools} if tools else {}
        mark = rig.recorder.mark()
        first = agent.turn("Search for the results.", nvext, regex, extra_body=dict(extra), **arguments)
        prefill = wait_prefill(rig, mark) if hinted else None
        if first.tool_calls:
            for call in first.tool_calls:
                agent.messages.append({"role": "tool", "tool_call_id": call["id"], "content": "a result of the search"})
        text = None if first.tool_calls else "Now compare the two results."
        second = agent.turn(text, nvext, regex, extra_body=dict(extra), **arguments)
        # The second turn is warmed for too; that one is not looked at.
        between = [e for e in rig.recorder.since(mark, "/v1/chat/completions") if e.number < second.exchange.number]
        side = [e for e in between if e is not first.exchange]
        line = rig.gateway.access_line(first.request_id) or {}
        seen[hinted] = (first, second, prefill, side, line)

    first, second, prefill, side, line = seen[True]
    plain = seen[False]
    claims.check(
        f"{title}: the next turn finds more in the cache with a speculative prefill than without",
        plain[1].cached is not None and second.cached is not None and second.cached > plain[1].cached,
        f"cached {second.cached} of {second.usage.get('prompt_tokens')} prompt tokens with, "
        f"{plain[1].cached} of {plain[1].usage.get('prompt_tokens')} without",
    )
    claims.check(
        f"{title}: no prefill without the hint",
        not plain[3],
        f"other requests of that conversation: {len(plain[3])}; access log: {plain[4].get('prefill')}",
    )
    if not claims.check(f"{title}: one prefill with the hint", prefill is not None and len(side) == 1, f"access log: {line.get('prefill')}"):
        return
    body = prefill.json
    claims.check(
        f"{title}: it asks for one token, at the lowest priority, in the session, without nvext",
        (body["max_tokens"], body["priority"], bool(body.get("stream"))) == (1, LOWEST, False)
        and body.get("session_id") == first.exchange.json["session_id"]
        and b"nvext" not in prefill.body,
        f"{ {k: v for k, v in body.items() if k not in ('messages', 'tools')} }",
    )
    claims.check(
        f"{title}: it begins after the stream",
        prefill.began >= first.exchange.last_piece and prefill.status == 200,
        f"{(prefill.began - first.exchange.last_piece) * 1000:.1f} ms after its last bytes, answered {prefill.status}",
    )
    sent = [m for m in body["messages"] if m["role"] == "assistant"][-1]
    calls = [call["function"] for call in sent.get("tool_calls") or []]
    claims.check(
        f"{title}: it carries the history and the answer, and tools as before",
        body["messages"][: len(first.exchange.json["messages"])] == first.exchange.json["messages"]
        and (sent.get("content") or "") == first.text
        and calls == [call["function"] for call in first.tool_calls]
        and body.get("tools") == first.exchange.json.get("tools"),
        f"roles {[m['role'] for m in body['messages']]}, answer of {len(first.text)} characters, {len(calls)} calls",
    )


def never_for_aborted(claims, rig):
    agent = Agent(rig)
    nvext = {"agent_hints": {"speculative_prefill": True}}
    mark = rig.recorder.mark()
    turn = agent.turn("Write at length.", nvext, "[a-z ]{3000}", max_tokens=2500, leave_after=3)
    rig.recorder.wait(lambda: turn.exchange.end, 10)
    time.sleep(1)
    side = [e for e in rig.recorder.since(mark, "/v1/chat/completions") if e is not turn.exchange]
    claims.check("no prefill for a turn whose client left", not side, f"other chat requests: {len(side)}")


def hangs_up_after_done(claims, rig, count=10):
    """As the OpenAI client does: it closes the connection when it has read `[DONE]`, before the body's end."""
    lines, prefills, mark = [], 0, rig.recorder.mark()
    for number in range(count):
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"Write, {number}."}],
            "max_tokens": 100,
            "regex": "[a-z ]{20}",
            "chat_template_kwargs": NO_GRAMMAR_DELAY,
            "stream": True,
            "nvext": {"agent_hints": {"speculative_prefill": True}},
        }
        before, received = rig.recorder.mark(), b""
        with (
            httpx.Client(timeout=60) as http,
            http.stream("POST", f"{rig.gateway.url}/v1/chat/completions", json=body) as response,
        ):
            for piece in response.iter_raw():
                received += piece
                if b"data: [DONE]" in received:
                    break
        prefills += wait_prefill(rig, before, 3) is not None
        lines.append(rig.gateway.access_line(response.headers["x-request-id"]) or {})
    aborts = rig.recorder.since(mark, "/abort_request")
    claims.check(
        "a client that hangs up after [DONE] had its turn: it is logged as finished, warmed, and nothing is aborted",
        all((line.get("end"), line.get("status")) == ("finished", 200) for line in lines) and prefills == count and not aborts,
        f"ends {[line.get('end') for line in lines]}, {prefills} prefills, {len(aborts)} abort_request for {count} turns",
    )


def wait_prefill(rig, mark, seconds=20):
    """The finished prefill since `mark`; None when none came."""

    def found():
        return next(
            (
                e
                for e in rig.recorder.since(mark, "/v1/chat/completions")
                if e.end and e.json and e.json.get("max_tokens") == 1
            ),
            None,
        )

    return rig.recorder.wait(found, seconds)
