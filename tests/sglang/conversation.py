"""An agent's conversation with a real SGLang through Turnstile, and what each side saw of it, as claims.

Usage: conversation.py --gateway target/debug/turnstile [--keep DIRECTORY] [FLOW ...]
"""

import argparse
import contextlib
import dataclasses
import pathlib
import signal
import sys
import tempfile

import crashes
import exact
import prefill
import streaming
import tagged
from claims import Claims
from recorder import Recorder
from rig import HERE, Gateway, Worker, recorded

FLOWS = ["tagged", "prefill", "exact", "streaming", "crashes"]


@dataclasses.dataclass
class Rig:
    """A conversation's road: client, `gateway`, `recorder`, `worker`."""

    worker: Worker
    recorder: Recorder
    gateway: Gateway


def tagged_server(claims, binary, folder, flows):
    """Chat with full history on a server whose radix cache knows sessions by a tag."""
    flags = ["--enable-session-radix-cache", "--enable-priority-scheduling", "--enable-cache-report"]
    flags += ["--reasoning-parser", "qwen3", "--tool-call-parser", "qwen25"]
    flags += ["--chat-template", str(HERE / "model" / "drops-reasoning.jinja")]
    claims.section("starting SGLang " + " ".join(flags[:3]))
    with (
        Worker(folder, "sglang-tagged", *flags) as worker,
        recorded(worker, folder, "received-tagged") as recorder,
        Gateway(binary, folder, "gateway-tagged", recorder.url) as gateway,
    ):
        rig = Rig(worker, recorder, gateway)
        if "tagged" in flows:
            claims.run("sessions by tag, priority, cached tokens", tagged.run, rig)
        if "prefill" in flows:
            claims.run("speculative prefill", prefill.run, rig)
        if "exact" in flows:
            claims.run("the client's bytes are the worker's", exact.run, rig)
        if "tagged" in flows:
            claims.run("shutdown", tagged.shutdown, rig)
            one = "[admission]\nmax_in_flight_per_worker = 1"
            with Gateway(binary, folder, "gateway-one", recorder.url, one) as busy:
                claims.run("order in the queue", tagged.overtaking, Rig(worker, recorder, busy))


def streaming_server(claims, binary, folder):
    """`/generate` with deltas on a server with streaming sessions. Without a cache report, so that cached tokens on
    chat have to be learned the other way."""
    flags = ["--enable-streaming-session", "--enable-priority-scheduling"]
    claims.section("starting SGLang " + " ".join(flags))
    with Worker(folder, "sglang-streaming", *flags) as worker, recorded(worker, folder, "received-streaming") as recorder:
        with Gateway(binary, folder, "gateway-wait", recorder.url, '[sessions]\nbusy = "wait"') as gateway:
            rig = Rig(worker, recorder, gateway)
            claims.run("streaming session: deltas", streaming.deltas, rig)
            claims.run('streaming session: busy = "wait"', streaming.wait, rig)
            claims.run("no cache report: the client's bytes are the worker's", exact.without_cache_report, rig)
            claims.run("streaming session: shutdown", streaming.shutdown, rig)
        with Gateway(binary, folder, "gateway-refuse", recorder.url, '[sessions]\nbusy = "refuse"') as gateway:
            claims.run('streaming session: busy = "refuse"', streaming.refuse, Rig(worker, recorder, gateway))
        claims.run("streaming session: what the worker was spared", streaming.safety, recorder, worker)
        claims.run("the same without a gateway", streaming.bare, worker)


def crashing(claims, binary, folder):
    """The sequences of turns, disconnects and closes that end a bare server."""
    flags = ["--enable-streaming-session"]
    claims.section("starting SGLang " + " ".join(flags))
    with Worker(folder, "sglang-crashes", *flags) as worker, recorded(worker, folder, "received-crashes") as recorder:
        for busy in ("wait", "refuse"):
            tables = f'[sessions]\nbusy = "{busy}"'
            with Gateway(binary, folder, f"gateway-crashes-{busy}", recorder.url, tables) as gateway:
                claims.run(f'through the gateway, busy = "{busy}"', crashes.run, Rig(worker, recorder, gateway), busy)
        claims.run("what the server was spared", crashes.safety, recorder, worker)
        claims.run("without a gateway: a third turn", crashes.bare, worker, "turn")
    with Worker(folder, "sglang-crashes-close", *flags) as worker:
        claims.run("without a gateway: a close", crashes.bare, worker, "close")


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--gateway", type=pathlib.Path, required=True, help="the turnstile binary")
    arguments.add_argument("--keep", type=pathlib.Path, help="keep logs and recorded exchanges in this directory")
    arguments.add_argument("flows", nargs="*", metavar="FLOW", help="of: " + ", ".join(FLOWS) + " (all)")
    given = arguments.parse_args()
    flows = given.flows or FLOWS
    if unknown := set(flows) - set(FLOWS):
        arguments.error("unknown flow: " + ", ".join(sorted(unknown)))
    # A request to end unwinds the contexts, which stop what was started.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))

    binary = given.gateway.resolve()
    claims = Claims()
    with contextlib.ExitStack() as stack:
        if given.keep:
            folder = given.keep.resolve()
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turnstile-sglang-")))
        if set(flows) - {"streaming", "crashes"}:
            claims.run("SGLang with tagged sessions", tagged_server, binary, folder, flows)
        if "streaming" in flows:
            claims.run("SGLang with streaming sessions", streaming_server, binary, folder)
        if "crashes" in flows:
            claims.run("SGLang and what ends it", crashing, binary, folder)
    return claims.close()


if __name__ == "__main__":
    sys.exit(main())
