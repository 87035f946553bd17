"""A pass-through proxy between gateway and worker that writes down what the worker received and answered.

As a program: recorder.py PORT UPSTREAM [FILE]   forwards 127.0.0.1:PORT to UPSTREAM (http://host:port) and appends one
JSON object per finished exchange to FILE (default standard output).
"""

import asyncio
import dataclasses
import json
import logging
import sys
import threading
import time

import aiohttp
from aiohttp import web

# Headers about one connection, which each side sets for itself (RFC 9110, 7.6.1).
HOP_BY_HOP = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
LARGEST_BODY = 128 << 20  # bytes

# A gateway that hangs up is no error here.
logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)


@dataclasses.dataclass
class Exchange:
    """One request as the worker received it. Times are seconds of the monotonic clock."""

    number: int
    method: str
    path: str
    headers: list
    body: bytes = b""
    began: float = 0.0
    status: int | None = None
    answer: bytes = b""
    last_piece: float | None = None  # when the worker's last bytes came, before they were passed on
    ended: float | None = None
    # How it ended: "complete", "client gone" (the gateway hung up), "worker gone".
    end: str | None = None

    @property
    def json(self):
        return json.loads(self.body) if self.body else None

    def header(self, name):
        return next((value for key, value in self.headers if key.lower() == name), None)

    def line(self):
        fields = dataclasses.asdict(self)
        fields["body"] = self.body.decode(errors="replace")
        fields["answer"] = self.answer.decode(errors="replace")
        return json.dumps(fields)


class Recorder:
    """The proxy on a thread of its own; `exchanges` grows as requests arrive."""

    def __init__(self, port, upstream, sink=None):
        self.url = f"http://127.0.0.1:{port}"
        self.exchanges = []
        self._port = port
        self._upstream = upstream
        self._sink = sink
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="recorder", daemon=True)

    # === life ===

    def __enter__(self):
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)
        return self

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    async def _start(self):
        self._client = aiohttp.ClientSession(
            # A connection each: an idle one that the worker closes would look like a fault of the worker.
            connector=aiohttp.TCPConnector(force_close=True, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )
        app = web.Application(client_max_size=LARGEST_BODY)
        app.router.add_route("*", "/{path:.*}", self._forward)
        # The handler is cancelled when the gateway hangs up, so that the worker notices as it would without us.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()

    async def _stop(self):
        await self._runner.cleanup()
        await self._client.close()

    # === forwarding ===

    async def _forward(self, request):
        exchange = self._begin(request)
        try:
            exchange.body = await request.read()
            headers = [(k, v) for k, v in exchange.headers if k.lower() not in HOP_BY_HOP | {"host", "content-length"}]
            async with self._client.request(
                request.method,
                self._upstream + request.raw_path,
                headers=headers,
                data=exchange.body or None,
                allow_redirects=False,
            ) as answer:
                exchange.status = answer.status
                response = web.StreamResponse(status=answer.status, reason=answer.reason)
                response.headers.clear()
                for name, value in answer.headers.items():
                    if name.lower() not in HOP_BY_HOP:
                        response.headers.add(name, value)
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    exchange.answer += piece
                    exchange.last_piece = time.monotonic()
                    self._notify()
                    await response.write(piece)
                # Before the end reaches the gateway: what it does next has then begun later.
                self._finish(exchange, "complete")
                await response.write_eof()
                return response
        except (asyncio.CancelledError, aiohttp.ClientConnectionResetError):
            # The latter is what a write to the gateway raises.
            self._finish(exchange, "client gone")
            raise
        except aiohttp.ClientError:
            self._finish(exchange, "worker gone")
            # Cut, as the worker's own connection was.
            if request.transport is not None:
                request.transport.abort()
            raise

    def _begin(self, request):
        with self._changed:
            exchange = Exchange(
                number=len(self.exchanges),
                method=request.method,
                path=request.raw_path,
                headers=[(k.decode(), v.decode("latin-1")) for k, v in request.raw_headers],
                began=time.monotonic(),
            )
            self.exchanges.append(exchange)
            self._changed.notify_all()
        return exchange

    def _finish(self, exchange, end):
        with self._changed:
            if exchange.end is None:
                exchange.ended = time.monotonic()
                exchange.end = end
                if self._sink:
                    print(exchange.line(), file=self._sink, flush=True)
            self._changed.notify_all()

    def _notify(self):
        with self._changed:
            self._changed.notify_all()

    # === reading ===

    def mark(self):
        """A position; `since` returns what arrived after it."""
        with self._changed:
            return len(self.exchanges)

    def since(self, mark, path=None):
        """The requests that arrived after `mark`; those to `path` (its query aside), or all that are no probes."""
        with self._changed:
            later = self.exchanges[mark:]
        if path is None:
            return [e for e in later if e.method == "POST"]
        return [e for e in later if e.path.split("?")[0] == path]

    def wait(self, found, seconds):
        """Waits until `found()` returns something true, and returns it; what it last returned when time is up."""
        deadline = time.monotonic() + seconds
        while True:
            # Looked at outside of the lock, which `since` takes; a change in between is seen at the next look.
            result = found()
            left = deadline - time.monotonic()
            if result or left <= 0:
                return result
            with self._changed:
                self._changed.wait(min(left, 0.05))


def main(port, upstream, path=None):
    sink = open(path, "a", encoding="utf-8") if path else sys.stdout
    with Recorder(int(port), upstream.rstrip("/"), sink):
        threading.Event().wait()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        pass
