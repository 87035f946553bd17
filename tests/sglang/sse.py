"""Server-sent events as SGLang sends them, and the bytes of a response as they came."""

import json
import re

import httpx


class Tee(httpx.HTTPTransport):
    """Keeps status, headers and raw bytes of every response, for comparing what a client library hides."""

    def __init__(self):
        super().__init__()
        self.responses = []

    def handle_request(self, request):
        response = super().handle_request(request)
        kept = Kept(response)
        self.responses.append(kept)
        return httpx.Response(
            response.status_code, headers=response.headers, stream=kept, extensions=response.extensions
        )


class Kept(httpx.SyncByteStream):
    def __init__(self, response):
        self.status = response.status_code
        self.headers = response.headers
        self.body = b""
        self._stream = response.stream

    def __iter__(self):
        for piece in self._stream:
            self.body += piece
            yield piece

    def close(self):
        self._stream.close()


def events(body):
    """The events of a stream, each with the bytes that end it."""
    return [event + b"\n\n" for event in body.split(b"\n\n") if event]


def data(event):
    """The JSON of an event; None for `[DONE]`."""
    payload = event.split(b"data:", 1)[-1].strip()
    return None if payload == b"[DONE]" else json.loads(payload)


def split_added(sent, received):
    """Compares what the worker sent with what the client received, event by event.

    Returns (whether the rest is byte for byte the same, the events that were taken out).
    """
    taken, rest = [], events(received)
    for event in events(sent):
        if rest and event == rest[0]:
            rest.pop(0)
        else:
            taken.append(event)
    return not rest, taken


# What differs between two runs of the same request: ids, and all that is a time or a speed.
_PER_RUN = re.compile(
    rb'"([a-z_]*id|created|created_at|completed_at|decode_throughput|[a-z0-9_]+_(?:time|ts|wait|latency))":\s*("[^"]*"|[0-9.eE+-]+|null)'
)


def without_run(body):
    """The bytes with ids and times replaced, so that two runs of one request can be compared."""
    return _PER_RUN.sub(rb'"\1":*', body)


def regrouped(body):
    """What a stream says, however its tokens were grouped into events: SGLang puts more of them into one when it is busy.

    A list of [event without its text, text]; events that differ only in their text are one.
    """
    said = []
    for event in events(without_run(body).replace(b":*", b":0")):
        name, payload = event.split(b"data:", 1)[0].strip(), data(event)
        text, index = "", 0
        if isinstance(payload, dict):
            if "output_ids" in payload and said and said[-1][0] == "cumulative":
                said.pop()  # of /generate, the last event says it all
            if "output_ids" in payload:
                said.append(["cumulative", json.dumps(payload)])
                continue
            payload.pop("sequence_number", None)
            if payload.get("choices"):
                payload.pop("usage", None)  # so far, with continuous_usage_stats
                index = payload["choices"][0]["index"]
            for place, key in text_places(payload):
                if isinstance(place.get(key), str):
                    text += place[key]
                    place[key] = None
        skeleton = (name, index, json.dumps(payload))
        # The answers of one request come interleaved.
        same = next((entry for entry in reversed(said) if entry[0][1] == index), None)
        if text and same and same[0] == skeleton:
            same[1] += text
        else:
            said.append([skeleton, text])
    return sorted(said, key=lambda entry: entry[0][1] if isinstance(entry[0], tuple) else 0)


def text_places(payload):
    """Where an event of any of the protocols carries new text."""
    yield payload, "delta"
    if isinstance(payload.get("delta"), dict):
        yield payload["delta"], "text"
    for choice in payload.get("choices") or []:
        yield choice, "text"
        delta = choice.get("delta") or {}
        yield delta, "content"
        yield delta, "reasoning_content"
        for call in delta.get("tool_calls") or []:
            yield call["function"], "arguments"
