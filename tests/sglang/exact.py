"""The client's bytes are the worker's: compared with what the worker sent in the same exchange, and with what it answers
to the same request without a gateway."""

import json

import httpx

import sse
from rig import MODEL

PROMPT = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "Write.\té😀\\n"}]
SEEDED = {"model": MODEL, "temperature": 0, "seed": 7}
CHAT = {**SEEDED, "messages": PROMPT, "max_tokens": 40}
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}}}
CALL = r'<tool_call>\n\{"name": "search", "arguments": \{"query": "[a-z ]{30}"\}\}\n</tool_call>'
NATIVE = {"text": "Write.", "sampling_params": {"temperature": 0, "max_new_tokens": 24}}
REQUESTS = {
    "chat, streamed": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "chat, streamed with usage": ("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    "chat, streamed with cached tokens": ("/v1/chat/completions", {**CHAT, "stream": True, "return_cached_tokens_details": True}),
    "chat, streamed with usage in every event": (
        "/v1/chat/completions",
        {**CHAT, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "chat, streamed, two answers": ("/v1/chat/completions", {**CHAT, "stream": True, "n": 2}),
    "chat, streamed tool call": (
        "/v1/chat/completions",
        {**CHAT, "stream": True, "tools": [TOOL], "regex": CALL, "max_tokens": 100, "chat_template_kwargs": {"enable_thinking": False}},
    ),
    "chat, whole": ("/v1/chat/completions", CHAT),
    "completions, streamed": ("/v1/completions", {**SEEDED, "prompt": "Write.", "max_tokens": 24, "stream": True}),
    "completions, whole": ("/v1/completions", {**SEEDED, "prompt": "Write.", "max_tokens": 24}),
    "generate, streamed": ("/generate", {**NATIVE, "stream": True}),
    "generate, whole": ("/generate", NATIVE),
    "messages, streamed": ("/v1/messages", {"model": MODEL, "messages": PROMPT[1:], "max_tokens": 24, "temperature": 0, "stream": True}),
    "messages, whole": ("/v1/messages", {"model": MODEL, "messages": PROMPT[1:], "max_tokens": 24, "temperature": 0}),
    "responses, streamed": ("/v1/responses", {**SEEDED, "input": "Write.", "max_output_tokens": 24, "stream": True}),
    "responses, whole": ("/v1/responses", {**SEEDED, "input": "Write.", "max_output_tokens": 24}),
    "refused by the worker: chat longer than the context": (
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "user", "content": "compare " * 40_000}], "stream": True},
    ),
    "refused by the worker: chat with an unknown adapter": ("/v1/chat/completions", {**CHAT, "lora_path": "none"}),
    "refused by the worker: generate with an unknown parameter": ("/generate", {**NATIVE, "sampling_params": {"nonsense": 1}}),
}


def run(claims, rig):
    for title, (path, body) in REQUESTS.items():
        compare(claims, rig, title, path, body)
    untouched(claims, rig)
    explained(claims, rig)


def untouched(claims, rig):
    """What is not the gateway's reaches the worker as it was written: spelling of numbers, escapes, space, order."""
    begin = '{ "unknown":[1.50e+0 , -0.0, 12345678901234567890123], "messages" : [ {"content":"\\u00e9\\/é","role" :"user"} ],\t'
    end = '"temperature":0.00 , "model":"tiny","max_tokens":1e0 }'
    nvext = '"nvext":{"agent_hints":{"priority":3}},'
    mark = rig.recorder.mark()
    answer = httpx.post(
        f"{rig.gateway.url}/v1/chat/completions", content=begin + nvext + end, headers={"content-type": "application/json"}, timeout=60
    )
    received = rig.recorder.since(mark)[0].body.decode()
    claims.check(
        "a body with odd spelling reaches the worker as it was written, but for what the gateway took out and set",
        all(piece in received for piece in (begin.rstrip().rstrip(",").lstrip("{ "), end.lstrip().rstrip(" }"))) and "nvext" not in received,
        f"{received}; answered {answer.status_code}",
    )


def explained(claims, rig):
    """Of an answer that is no stream, the headers can tell what the worker reported."""
    mark = rig.recorder.mark()
    answer = httpx.post(
        f"{rig.gateway.url}/v1/chat/completions", json=CHAT, headers={"x-turnstile-explain": "1"}, timeout=60
    )
    reported = json.loads(rig.recorder.since(mark)[0].answer)["usage"]["prompt_tokens_details"]["cached_tokens"]
    claims.check(
        "the explain headers of a whole answer tell the cached tokens that the worker reported",
        answer.headers.get("x-turnstile-cached-tokens") == str(reported),
        f"{ {k: v for k, v in answer.headers.items() if k.startswith('x-turnstile-')} }, reported {reported}",
    )


def without_cache_report(claims, rig):
    """The worker's usage lacks cached tokens, so the gateway asks for them in `sglext`."""
    for title in ("chat, streamed", "chat, streamed with usage", "chat, streamed with cached tokens", "chat, whole"):
        exchange, line = compare(claims, rig, title, *REQUESTS[title])
        claims.check(
            f"{title}: cached tokens are learned without --enable-cache-report",
            line is not None and line.get("cached_tokens", 0) > 0,
            f"access log: cached_tokens {line and line.get('cached_tokens')} of prompt_tokens {line and line.get('prompt_tokens')}",
        )


def compare(claims, rig, title, path, body):
    """One request directly and through the gateway. Returns the recorded exchange and the line of the access log."""
    content = json.dumps(body, ensure_ascii=False)
    headers = {"content-type": "application/json"}
    with httpx.Client(timeout=120) as http:
        # The first fills the cache: the others then compute the same.
        http.post(rig.worker.url + path, content=content, headers=headers)
        direct = http.post(rig.worker.url + path, content=content, headers=headers)
        mark = rig.recorder.mark()
        through = http.post(rig.gateway.url + path, content=content, headers=headers)
    exchange = rig.recorder.since(mark, path)[0]

    if body.get("stream") and exchange.status == 200:
        same, taken = sse.split_added(exchange.answer, through.content)
        ours = [sse.data(event) for event in taken]
        claims.check(
            f"{title}: the client receives the worker's events, less those the gateway asked for",
            same and all(data and data["choices"] == [] and (data.get("usage") or data.get("sglext")) for data in ours),
            f"{len(sse.events(exchange.answer))} events, {len(taken)} taken out: {[told(data) for data in ours]}",
        )
    else:
        sent = without_added(json.loads(exchange.answer), body)
        claims.check(
            f"{title}: the client receives the worker's answer, less what the gateway asked for",
            list(flat(sent)) == list(flat(json.loads(through.content))),
            f"worker sent {len(exchange.answer)} bytes, client received {len(through.content)}",
        )
    identical = sse.without_run(through.content) == sse.without_run(direct.content)
    claims.check(
        f"{title}: as without a gateway, but for ids and times",
        (through.status_code, through.headers["content-type"]) == (direct.status_code, direct.headers["content-type"])
        and (identical or (exchange.status == 200 and body.get("stream") and sse.regrouped(through.content) == sse.regrouped(direct.content))),
        f"{through.status_code} {through.headers['content-type']}, {len(direct.content)} and {len(through.content)} bytes, "
        + ("the same" if identical else "the same tokens, which the worker grouped otherwise into events"),
    )
    return exchange, rig.gateway.access_line(through.headers.get("x-request-id"))


def told(data):
    """What an event of the gateway's own asking tells."""
    return "sglext" if data and data.get("sglext") else "usage" if data and data.get("usage") else data


def without_added(answer, body):
    """A whole answer without the member that the gateway asked for on its own."""
    if not body.get("return_cached_tokens_details"):
        answer.pop("sglext", None)
    return answer


def flat(value, path=()):
    """All values with their paths in order, so that the order of members counts too."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from flat(inner, (*path, index))
    else:
        yield path, value
