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
    rb'"(id|created|e2e_latency|queue_time|decode_throughput|[a-z_]+_(?:time|ts|wait|latency))":\s*("[^"]*"|[0-9.eE+-]+|null)'
)


def without_run(body):
    """The bytes with ids and times replaced, so that two runs of one request can be compared."""
    return _PER_RUN.sub(rb'"\1":*', body)
