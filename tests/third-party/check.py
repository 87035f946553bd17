"""Asks each module what it is for, and says in one line for each what was asked and what was seen."""

import argparse
import pathlib
import sys
import time
import traceback

import cases
import rig


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turnstile", required=True)
    parser.add_argument("--modules", required=True, type=pathlib.Path)
    parser.add_argument("--state", required=True)
    parser.add_argument("--sums", required=True, type=pathlib.Path)
    parser.add_argument("--only", default="", help="only cases whose name has this in it")
    options = parser.parse_args()
    sums = {path: digest for digest, path in (line.split() for line in options.sums.read_text().splitlines())}
    stage = Stage(options, sums)
    began, failed, met = time.monotonic(), 0, set()
    try:
        for case in cases.ALL:
            if options.only in case.name:
                failed += not run(case, stage)
                met.update(case.modules)
    finally:
        stage.stop()
    if not options.only:
        for path in sorted(set(sums) - {stage.paths[name] for name in met}):
            print(f"FAIL  {path}: no case for it")
            failed += 1
    print(f"{len(met)} modules of {len(sums)}, {failed} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed or not met else 0


def run(case, stage):
    names = ", ".join(f"{name} {stage.version(name)} ({stage.digest(name)[:12]})" for name in case.modules)
    try:
        seen = case.check(stage)
        print(f"PASS  {names}: {case.asked}; seen: {seen}", flush=True)
        return True
    except Exception as error:
        print(f"FAIL  {names}: {case.asked}; {error}", flush=True)
        if not isinstance(error, (cases.Wrong, RuntimeError)):
            traceback.print_exc()
        return False


class Stage:
    """What cases run on. Workers, service and Redis server are there for all of them."""

    def __init__(self, options, sums):
        self.options, self.sums = options, sums
        self.paths = {path.split("/")[0]: path for path in sums}
        self.workers = rig.Workers(options.turnstile, 2)
        self.service = rig.Service()
        self.redis = rig.Redis()

    def version(self, name):
        return self.paths[name].split("/")[1]

    def digest(self, name):
        return self.sums[self.paths[name]]

    def plugin(self, module, config=None, name=None, **keys):
        plugin = {
            "name": name or module,
            "wasm": str(self.options.modules / self.paths[module]),
            "sha256": self.digest(module),
            "phase": "filter",
            "dialect": "higress",
            "instances": 1,
            # A build for debugging, on a machine that others use as well.
            "callback_timeout_ms": 10_000,
            "configure_timeout_ms": 60_000,
            **keys,
        }
        if config is not None:
            plugin["config"] = config
        return plugin

    def gateway(self, *plugins):
        upstreams = [
            {"name": "service", "url": f"http://127.0.0.1:{self.service.port}"},
            {"name": "redis", "url": f"redis://127.0.0.1:{self.redis.port}/0", "password": self.redis.password},
        ]
        return rig.Gateway(self.options.turnstile, self.options.state, self.workers.urls, list(plugins), upstreams)

    def started(self, *plugins):
        gateway = self.gateway(*plugins)
        try:
            return gateway.start(len(self.workers.urls))
        except Exception:
            gateway.stop()
            raise

    def arrived(self, path="/v1/chat/completions"):
        """The requests on a path that arrived at any worker, so far."""
        return [request for at in range(len(self.workers.urls)) for request in self.workers.requests(at, path)]

    def stop(self):
        self.workers.stop()
        self.redis.stop()
        self.service.shutdown()


if __name__ == "__main__":
    sys.exit(main())
