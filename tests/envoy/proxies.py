"""Envoy and Turnstile as child processes, each with one filter, and what the filter logs on each."""

import json
import os
import re
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request

from gateway import free_port, parsed, toml

PATIENCE = 60.0


class Process:
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

    def line(self, find):
        """What `find` finds in a line, as soon as there is one."""
        return self.until(lambda: next((found for line in self.text() if (found := find(line)) is not None), None))

    def text(self):
        return [line for line in self.lines if line is not None]

    def until(self, condition):
        end = time.monotonic() + PATIENCE
        with self.changed:
            while True:
                if (found := condition()) is not None:
                    return found
                if self.lines and self.lines[-1] is None:
                    raise RuntimeError("it ended:\n" + "\n".join(self.text()[-30:]))
                if (left := end - time.monotonic()) <= 0:
                    raise RuntimeError("it did not get there:\n" + "\n".join(self.text()[-30:]))
                self.changed.wait(left)

    def stop(self):
        self.child.terminate()
        try:
            self.child.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


class Proxy:
    """What both have: an address, and the filter's lines so far."""

    def __init__(self, process, port, said):
        self.process, self.port, self.said = process, port, said

    def logged(self):
        return [said for line in self.process.text() if (said := self.said(line)) is not None]

    def settled(self, start, quiet=0.25):
        """The filter's lines from `start` on, once none has come for a while."""
        lines, since = self.logged(), time.monotonic()
        while time.monotonic() - since < quiet:
            time.sleep(0.02)
            now = self.logged()
            if len(now) != len(lines):
                lines, since = now, time.monotonic()
        return lines[start:]

    def stop(self):
        self.process.stop()


def envoy(binary, module, configuration, ports):
    listen = free_port()
    cluster = {"connect_timeout": "1s", "type": "STATIC"}

    def static(name, port, http2=False):
        place = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}
        made = dict(cluster, name=name, load_assignment={"cluster_name": name, "endpoints": [{"lb_endpoints": [{"endpoint": place}]}]})
        if http2:
            options = {"explicit_http_config": {"http2_protocol_options": {}}}
            made["typed_extension_protocol_options"] = {
                "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                    "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                    **options,
                }
            }
        return made

    plugin = {
        "name": "shapes",
        "root_id": "shapes",
        "configuration": {"@type": "type.googleapis.com/google.protobuf.StringValue", "value": configuration},
        "vm_config": {"vm_id": "shapes", "runtime": "envoy.wasm.runtime.v8", "code": {"local": {"filename": module}}},
    }
    filters = [
        {
            "name": "wasm",
            "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm", "config": plugin},
        },
        {
            "name": "router",
            "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
        },
    ]
    hosts = [{"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "default", "timeout": "10s"}}]}]
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "route_config": {"name": "routes", "virtual_hosts": hosts},
        "http_filters": filters,
    }
    bootstrap = {
        "node": {"id": "comparison", "cluster": "comparison"},
        "static_resources": {
            "listeners": [
                {
                    "name": "in",
                    "traffic_direction": "INBOUND",
                    "address": {"socket_address": {"address": "127.0.0.1", "port_value": listen}},
                    "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
                }
            ],
            "clusters": [
                static("default", ports["origin"]),
                static("auth", ports["auth"]),
                static("grpc", ports["grpc"], http2=True),
                static("closed", ports["closed"]),
            ],
        },
    }
    path = os.path.join(tempfile.mkdtemp(prefix="turnstile-envoy-"), "envoy.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(bootstrap, file)
    process = Process(
        [binary, "--config-path", path, "--concurrency", "1", "--log-level", "warn", "--component-log-level", "wasm:trace"]
        + ["--log-format", "%v", "--disable-hot-restart"]
    )
    wait_listening(process, listen)
    pattern = re.compile(r"wasm log (?:shapes ?)+: (.*)$")
    return Proxy(process, listen, lambda line: found.group(1) if (found := pattern.search(line)) else None)


def turnstile(binary, module, configuration, ports):
    directory = tempfile.mkdtemp(prefix="turnstile-envoy-")
    path = os.path.join(directory, "turnstile.toml")
    config = {
        "threads": 1,
        "listeners": [{"address": "127.0.0.1:0"}],
        "admin": {"address": "127.0.0.1:0"},
        "logging": {"access": "off", "level": "info"},
        "state": {"dir": os.path.join(directory, "state")},
        "pools": [{"name": "default", "workers": [f"http://127.0.0.1:{ports['origin']}"]}],
        "upstreams": [
            {"name": "auth", "url": f"http://127.0.0.1:{ports['auth']}"},
            {"name": "grpc", "url": f"http://127.0.0.1:{ports['grpc']}", "h2c": True},
            {"name": "closed", "url": f"http://127.0.0.1:{ports['closed']}"},
        ],
        "plugins": [
            {
                "name": "shapes",
                "wasm": module,
                "phase": "filter",
                "instances": 1,
                "upstreams": ["auth", "grpc", "closed"],
                "config": json.loads(configuration),
            }
        ],
    }
    with open(path, "w", encoding="utf-8") as file:
        file.write(toml(config))
    process = Process([binary, "run", "--config", path])

    def told(name):
        def find(line):
            event = parsed(line)
            return event.get(name) if isinstance(event.get(name), str) else None

        return find

    port = int(process.line(told("listener")).rsplit(":", 1)[1])
    admin = process.line(told("admin"))
    end = time.monotonic() + PATIENCE
    while True:
        with urllib.request.urlopen(f"http://{admin}/workers", timeout=10) as page:
            if any(worker.get("state") == "ready" for worker in json.load(page)["workers"]):
                break
        if time.monotonic() > end:
            raise RuntimeError("the gateway does not see its worker ready")
        time.sleep(0.02)

    def said(line):
        event = parsed(line)
        # The host's own lines about the plugin name it too; the filter's begin with a word and a colon.
        text = event.get("message", "") if event.get("plugin") == "shapes" else ""
        return text if re.match(r"[a-z-]+: ", text) else None

    return Proxy(process, port, said)


def wait_listening(process, port):
    end = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > end or process.child.poll() is not None:
                raise RuntimeError("Envoy does not listen:\n" + "\n".join(process.text()[-30:])) from None
            time.sleep(0.05)
