"""Starts and stops what a run needs: the real SGLang, the gateway, the recorder between them."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import time

import httpx

from recorder import Recorder

HERE = pathlib.Path(__file__).resolve().parent
MODEL = "tiny"
START_S = 300  # seconds a server may take to get ready on a busy machine


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Process:
    """A program in a process group of its own, its output in a file. Leaving the context ends the whole group."""

    def __init__(self, name, command, log, environment=None):
        self.name = name
        self.log = pathlib.Path(log)
        self._command = [str(part) for part in command]
        self._environment = {**os.environ, **(environment or {})}
        self._process = None

    def __enter__(self):
        with open(self.log, "ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_):
        self.stop()

    @property
    def pid(self):
        return self._process.pid

    def exit_code(self):
        """None while it runs."""
        return self._process.poll()

    def wait(self, seconds):
        """Its exit code, or None when it still runs after that time."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, seconds=20):
        """Asks it to end, and returns its exit code; None when it had to be killed."""
        code = self.exit_code()
        if code is None:
            self._process.terminate()
            code = self.wait(seconds)
        # Children that outlive it, and itself if it did not listen.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        return code

    def tail(self, lines=15):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def wait_ready(process, url, seconds=START_S):
    """Waits for 200 from `url`.

    Raises RuntimeError, with the end of the log, when the process ends or the time is up.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.exit_code() is not None:
            raise RuntimeError(f"{process.name} ended with {process.exit_code()}:\n{process.tail()}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"{process.name} was not ready after {seconds} s:\n{process.tail()}")


class Worker(Process):
    """A real SGLang server with the given flags."""

    def __init__(self, folder, name, *flags):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        super().__init__(name, [HERE / "start.sh", self.port, *flags], folder / f"{name}.log")

    def __enter__(self):
        super().__enter__()
        try:
            wait_ready(self, f"{self.url}/ready")
        except BaseException:
            self.stop()
            raise
        return self

    def is_well(self):
        """Whether it answers /ready, and its scheduler still runs a request. (Its probes pass also when that hangs.)"""
        try:
            with httpx.Client(timeout=30) as http:
                turn = {"text": "ping", "sampling_params": {"max_new_tokens": 1}}
                ready = http.get(f"{self.url}/ready")
                ran = http.post(f"{self.url}/generate", json=turn)
                return ready.status_code == 200 and ran.status_code == 200 and self.exit_code() is None
        except httpx.HTTPError:
            return False

    def token_count(self, text):
        answer = httpx.post(f"{self.url}/tokenize", json={"model": MODEL, "prompt": text, "add_special_tokens": False})
        return answer.raise_for_status().json()["count"]

    def load(self):
        return httpx.get(f"{self.url}/v1/loads", timeout=10).raise_for_status().json()["loads"][0]


class Gateway(Process):
    """`turnstile run` in front of one worker URL; `tables` is more of its configuration."""

    def __init__(self, binary, folder, name, upstream, tables=""):
        self.port, admin = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.admin = f"http://127.0.0.1:{admin}"
        self.access = folder / f"{name}-access.jsonl"
        config = folder / f"{name}.toml"
        config.write_text(
            f"""
[[listeners]]
address = "127.0.0.1:{self.port}"

[admin]
address = "127.0.0.1:{admin}"

[[pools]]
workers = [{{ url = "{upstream}", id = "worker" }}]

{tables}

[logging]
access = "{self.access}"
explain_headers = true

[state]
dir = "{folder / 'state'}"
"""
        )
        super().__init__(name, [binary, "run", "--config", config], folder / f"{name}.log")

    def __enter__(self):
        super().__enter__()
        try:
            wait_ready(self, f"{self.url}/ready", 120)
        except BaseException:
            self.stop()
            raise
        return self

    def queue_depth(self):
        """Turns that wait in the gateway."""
        return httpx.get(f"{self.admin}/workers", timeout=10).raise_for_status().json()["queue_depth"]

    def sessions(self):
        """What the admin listener lists."""
        return httpx.get(f"{self.admin}/sessions", timeout=10).raise_for_status().json()["sessions"]

    def access_lines(self):
        """The access log so far, one object per request; a line that is not written whole yet is not in it."""
        if not self.access.exists():
            return []
        return [json.loads(line) for line in self.access.read_text().split("\n")[:-1]]

    def access_line(self, request_id, seconds=10):
        """The line of one request, which is written after its end."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for line in self.access_lines():
                if line.get("request_id") == request_id:
                    return line
            time.sleep(0.05)
        return None


@contextlib.contextmanager
def recorded(worker, folder, name):
    """A recorder in front of `worker`, its exchanges also in a file."""
    with open(folder / f"{name}.jsonl", "a", encoding="utf-8") as sink, Recorder(free_port(), worker.url, sink) as recorder:
        yield recorder
