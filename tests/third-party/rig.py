"""What the modules run on: simulated workers, a gateway for each case, a Redis server, and a small service that plugins call."""

import contextlib
import http.client
import json
import pathlib
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from gateway import free_port, parsed, toml

PATIENCE = 120.0


class Process:
    """A child process and what it has said so far."""

    def __init__(self, arguments):
        self.lines = []
        self.changed = threading.Condition()
        self.child = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.child.stdout:
            with self.changed:
                self.lines.append(line.decode("utf-8", "replace").rstrip("\n"))
                self.changed.notify_all()
        with self.changed:
            self.lines.append(None)
            self.changed.notify_all()

    def text(self):
        return "\n".join(line for line in self.lines if line is not None)

    def until(self, find):
        """What `find` finds in the lines, as soon as it does."""
        end = time.monotonic() + PATIENCE
        with self.changed:
            while True:
                found = find([line for line in self.lines if line is not None])
                if found is not None:
                    return found
                if self.lines and self.lines[-1] is None:
                    raise RuntimeError("it ended: " + last_words(self.text()))
                left = end - time.monotonic()
                if left <= 0:
                    raise RuntimeError("it did not get there: " + last_words(self.text()))
                self.changed.wait(left)

    def ended(self):
        code = self.child.wait(PATIENCE)
        end = time.monotonic() + PATIENCE
        with self.changed:
            while not (self.lines and self.lines[-1] is None) and time.monotonic() < end:
                self.changed.wait(0.1)
        return code

    def stop(self):
        self.child.terminate()
        try:
            self.child.wait(20)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


def last_words(text):
    return text[-1500:]


class Service(ThreadingHTTPServer):
    """What plugins call: an authorization service and a decision service."""

    daemon_threads = True

    def __init__(self):
        self.calls = []
        self.verdict = {}
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def port(self):
        return self.server_address[1]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer()

    def do_POST(self):
        self.answer()

    def answer(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.calls.append({"path": self.path, "headers": dict(self.headers), "body": body})
        status, headers, text = 404, {}, ""
        if self.path.startswith("/token-auth"):
            known = self.headers.get("authorization") == "Bearer good"
            status = 200 if known else 401
            headers = {"x-mse-consumer": "alice"} if known else {"www-authenticate": "Bearer"}
        elif self.path.startswith("/v1/systemone"):
            status, headers = 200, {"content-type": "application/json"}
            text = json.dumps({"answers": {"model_selection": self.server.verdict}})
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


class Redis:
    """A Redis server of its own, with a password."""

    password = "third-party"

    def __init__(self):
        self.directory = tempfile.mkdtemp(prefix="turnstile-redis-")
        for _ in range(5):
            self.port = free_port()
            self.process = Process(
                ["redis-server", "--bind", "127.0.0.1", "--port", str(self.port), "--requirepass", self.password]
                + ["--save", "", "--appendonly", "no", "--dir", self.directory]
            )
            with contextlib.suppress(RuntimeError):
                self.process.until(lambda lines: True if any("Ready to accept connections" in line for line in lines) else None)
                return
        raise RuntimeError("redis-server does not start: " + last_words(self.process.text()))

    def keys(self):
        """What it holds, asked for past the gateway."""
        with socket.create_connection(("127.0.0.1", self.port), 10) as connection:
            connection.sendall(f"AUTH {self.password}\r\nKEYS *\r\nQUIT\r\n".encode())
            reply = b""
            while piece := connection.recv(4096):
                reply += piece
        return re.findall(rb"\$\d+\r\n([^\r]+)\r\n", reply)

    def stop(self):
        self.process.stop()
        shutil.rmtree(self.directory, ignore_errors=True)


class Workers:
    """Simulated SGLang workers."""

    def __init__(self, binary, count):
        self.process = Process(
            [binary, "sim", "--workers", str(count), "--port", "0", "--model", "sim", "--speed", "50"]
        )
        urls = self.process.until(
            lambda lines: urls if len(urls := [line for line in lines if line.startswith("http://")]) == count else None
        )
        self.urls = urls

    def requests(self, at, path="/v1/chat/completions"):
        """The requests on a path that a worker got."""
        with urllib.request.urlopen(self.urls[at] + "/_sim/requests", timeout=30) as page:
            return [request for request in json.load(page) if request["path"] == path]

    def stop(self):
        self.process.stop()


class Gateway:
    def __init__(self, binary, state, workers, plugins, upstreams):
        self.directory = tempfile.mkdtemp(prefix="turnstile-third-party-")
        self.access = pathlib.Path(self.directory, "access.log")
        self.posted = 0
        self.counting = threading.Lock()
        config = {
            "threads": 1,
            "listeners": [{"address": "127.0.0.1:0"}],
            "admin": {"address": "127.0.0.1:0"},
            "logging": {"access": str(self.access), "level": "info"},
            "state": {"dir": state},
            "pools": [{"name": "default", "workers": [{"url": url, "id": f"w{at}"} for at, url in enumerate(workers)]}],
            "upstreams": upstreams,
            "plugins": plugins,
        }
        path = pathlib.Path(self.directory, "turnstile.toml")
        path.write_text(toml(config), encoding="utf-8")
        self.process = Process([binary, "run", "--config", str(path)])

    def start(self, workers):
        """Waits until it serves."""

        def told(name):
            return lambda lines: next((text for line in lines if isinstance(text := parsed(line).get(name), str)), None)

        self.port = int(self.process.until(told("listener")).rsplit(":", 1)[1])
        self.admin = self.process.until(told("admin"))
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            states = [worker["state"] for worker in json.loads(self.page("/workers"))["workers"]]
            if states.count("ready") == workers:
                return self
            time.sleep(0.02)
        raise RuntimeError("the gateway does not see its workers ready")

    def page(self, path):
        with urllib.request.urlopen(f"http://{self.admin}{path}", timeout=30) as page:
            return page.read().decode()

    def chat(self, text="Hello", headers=None, stream=False, **members):
        body = {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "stream": stream, **members}
        return self.post("/v1/chat/completions", body, headers)

    def post(self, path, body, headers=None):
        with self.counting:
            self.posted += 1
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            sent = {"content-type": "application/json", **(headers or {})}
            connection.request("POST", path, json.dumps(body), sent)
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.getheaders()), answer.read().decode("utf-8", "replace"))
        finally:
            connection.close()

    def records(self):
        """The access log, once it tells of every request that was posted: lines are written after their answers."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            text = self.access.read_text(encoding="utf-8") if self.access.exists() else ""
            # What follows the last line break is not written whole yet.
            lines = text.split("\n")[:-1]
            if len(lines) >= self.posted:
                return [json.loads(line) for line in lines]
            time.sleep(0.02)
        raise RuntimeError(f"{self.posted} requests were posted, and the access log has {len(lines)} lines")

    def refusal(self):
        """What it says when it does not start."""
        code = self.process.ended()
        if code == 0:
            raise RuntimeError("it started")
        return self.process.text()

    def stop(self):
        self.process.stop()
        shutil.rmtree(self.directory, ignore_errors=True)


class Answer:
    def __init__(self, status, headers, text):
        self.status, self.text = status, text
        self.headers = {name.lower(): value for name, value in headers.items()}

    def events(self):
        data = [line[5:].strip() for line in self.text.splitlines() if line.startswith("data:")]
        return [json.loads(text) for text in data if text != "[DONE]"]
