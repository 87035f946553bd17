"""The client's bytes are the worker's: compared with what the worker sent in the same exchange, and with what it answers
to the same request without a gateway."""

import json

import httpx

import sse
from rig import MODEL

PROMPT = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "Write.\té😀\\n"}]
SEEDED = {"model": MODEL, "temperature": 0, "seed": 7}
CHAT = {**SEEDED, "messages": PROMPT, "max_tokens": 40}
REQUESTS = {
    "chat, streamed": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "chat, streamed with usage": ("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    "chat, streamed with cached tokens": ("/v1/chat/completions", {**CHAT, "stream": True, "return_cached_tokens_details": True}),
    "chat, whole": ("/v1/chat/completions", CHAT),
    "completions, streamed": ("/v1/completions", {**SEEDED, "prompt": "Write.", "max_tokens": 24, "stream": True}),
    "completions, whole": ("/v1/completions", {**SEEDED, "prompt": "Write.", "max_tokens": 24}),
    "generate, streamed": ("/generate", {"text": "Write.", "sampling_params": {"temperature": 0, "max_new_tokens": 24}, "stream": True}),
    "generate, whole": ("/generate", {"text": "Write.", "sampling_params": {"temperature": 0, "max_new_tokens": 24}}),
}


def run(claims, rig):
    for title, (path, body) in REQUESTS.items():
        compare(claims, rig, title, path, body)


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
        # The first fills the cache: the next two then compute the same.
        http.post(rig.worker.url + path, content=content, headers=headers)
        direct = http.post(rig.worker.url + path, content=content, headers=headers)
        mark = rig.recorder.mark()
        through = http.post(rig.gateway.url + path, content=content, headers=headers)
    exchange = rig.recorder.since(mark, path)[0]

    if body.get("stream"):
        same, taken = sse.split_added(exchange.answer, through.content)
        ours = [sse.data(event) for event in taken]
        claims.check(
            f"{title}: the client receives the worker's events, less those the gateway asked for",
            same and all(data and not data["choices"] and (data.get("usage") or data.get("sglext")) for data in ours),
            f"{len(sse.events(exchange.answer))} events, {len(taken)} taken out: {[sorted(d)[-2:] for d in ours if d]}",
        )
    else:
        sent = without_added(json.loads(exchange.answer), body)
        claims.check(
            f"{title}: the client receives the worker's answer, less what the gateway asked for",
            list(flat(sent)) == list(flat(json.loads(through.content))),
            f"worker sent {len(exchange.answer)} bytes, client received {len(through.content)}",
        )
    claims.check(
        f"{title}: as without a gateway, but for ids and times",
        (through.status_code, through.headers["content-type"]) == (direct.status_code, direct.headers["content-type"])
        and sse.without_run(through.content) == sse.without_run(direct.content),
        f"{through.status_code} {through.headers['content-type']}, {len(direct.content)} and {len(through.content)} bytes",
    )
    return exchange, rig.gateway.access_line(through.headers.get("x-request-id"))


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
