"""What each module is for, and how that is seen from outside."""

import contextlib
import json
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Callable


class Wrong(Exception):
    """A module did not do what it is for."""


@dataclass
class Case:
    name: str
    modules: list
    asked: str
    check: Callable


ALL = []


def case(modules, asked, name=None):
    def add(check):
        ALL.append(Case(name or modules[0], modules, asked, check))
        return check

    return add


def expect(holds, what):
    if not holds:
        raise Wrong(what)


@contextlib.contextmanager
def serving(stage, *plugins):
    gateway = stage.started(*plugins)
    try:
        yield gateway
    finally:
        gateway.stop()


def arriving(stage, ask):
    """What `ask` answers, and the request that the worker got of it."""
    before = len(stage.arrived())
    by_worker = [len(stage.workers.requests(at)) for at in range(len(stage.workers.urls))]
    answer = ask()
    after = stage.arrived()
    expect(len(after) == before + 1, f"{len(after) - before} requests reached the workers; the client got {answer.status} {answer.text[:200]}")
    for at, count in enumerate(by_worker):
        requests = stage.workers.requests(at)
        if len(requests) > count:
            return answer, requests[-1]
    raise Wrong("no worker has it")


def header(request, name):
    headers = request["headers"]
    pairs = headers.items() if isinstance(headers, dict) else headers
    return next((value for key, value in pairs if key.lower() == name), None)


def refused(stage, plugin, words):
    gateway = stage.gateway(plugin)
    try:
        said = gateway.refusal()
    finally:
        gateway.stop()
    expect(words in said, f"the refusal does not say {words!r}: {said[-400:]}")
    return words


@case(["ai-data-masking"], "a prompt with a forbidden word, and one with a secret that is to be replaced")
def data_masking(stage):
    config = {
        "deny_openai": True,
        "deny_words": ["forbidden-word"],
        "deny_code": 403,
        "deny_message": "not here",
        "replace_roles": [{"regex": "sk-[0-9a-z]+", "type": "replace", "value": "****", "restore": False}],
    }
    with serving(stage, stage.plugin("ai-data-masking", config)) as gateway:
        before = len(stage.arrived())
        denied = gateway.chat("this is a forbidden-word in a prompt")
        expect("not here" in denied.text and len(stage.arrived()) == before, f"not denied: {denied.status} {denied.text[:200]}")
        answer, got = arriving(stage, lambda: gateway.chat("my key is sk-abc123"))
        content = json.loads(got["body"])["messages"][0]["content"]
        expect(answer.status == 200 and "sk-abc123" not in content and "****" in content, f"the worker got {content!r}")
        return f"the first was answered {denied.status} by the plugin and reached no worker, the second reached one as {content!r}"


@case(["ai-statistics"], "two chats, one of them streamed")
def statistics(stage):
    config = {"attributes": [{"key": "question", "value_source": "request_body", "value": "messages.@reverse.0.content", "apply_to_log": True}]}
    with serving(stage, stage.plugin("ai-statistics", config)) as gateway:
        for stream in (False, True):
            answer = gateway.chat(stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
            expect(answer.status == 200, f"{answer.status} {answer.text[:200]}")
        gateway.records()
        lines = [line for line in gateway.page("/metrics").splitlines() if line.startswith("turnstile_plugin_custom{")]
        counts = {line.split('name="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}
        tokens = {name: value for name, value in counts.items() if name.endswith("token")}
        expect(tokens and all(value > 0 for value in tokens.values()), f"its metrics are {counts}")
        return ", ".join(f"{name.rsplit('.', 1)[1]} = {value:.0f}" for name, value in sorted(tokens.items()))


@case(["gpustack-ai-proxy"], "a chat for a model that is mapped to another, with a provider's key")
def ai_proxy(stage):
    config = {
        "provider": {"type": "openai", "apiTokens": ["provider-key"], "modelMapping": {"*": "sim"}},
    }
    plugin = stage.plugin("gpustack-ai-proxy", config, secret_headers=["authorization", "x-api-key"])
    with serving(stage, plugin) as gateway:
        answer, got = arriving(stage, lambda: gateway.chat(headers={"authorization": "Bearer mine"}, model="anything"))
        model, key = json.loads(got["body"])["model"], header(got, "authorization")
        expect(answer.status == 200 and model == "sim" and key == "Bearer provider-key", f"{answer.status}: the worker got {model!r} with {key!r}")
        return f"the worker got the model {model!r} and {key!r}"


@case(["gpustack-ext-auth"], "a chat with a key that the authorization service knows, and one with another")
def ext_auth(stage):
    config = {
        "route_match_regexes": ["^chat$"],
        "authz": {
            "endpoint": {"path": "/token-auth", "request_method": "GET", "service_name": "service.static", "service_port": 80},
            "timeout": 10000,
        },
    }
    plugin = stage.plugin("gpustack-ext-auth", config, upstreams=["service"], secret_headers=["authorization", "x-api-key", "cookie"])
    with serving(stage, plugin) as gateway:
        calls = len(stage.service.calls)
        answer, got = arriving(stage, lambda: gateway.chat(headers={"authorization": "Bearer good"}))
        consumer = header(got, "x-mse-consumer")
        before = len(stage.arrived())
        bad = gateway.chat(headers={"authorization": "Bearer bad"})
        asked = len(stage.service.calls) - calls
        expect(answer.status == 200 and consumer == "alice", f"{answer.status}, consumer {consumer!r}")
        expect(bad.status == 401 and len(stage.arrived()) == before, f"the bad key got {bad.status}")
        return f"{asked} questions to the service; the first reached the worker as consumer {consumer!r}, the second was answered {bad.status}"


@case(["gpustack-generic-proxy-router"], "a chat for higress/auto and one for provider/model")
def router(stage):
    config = {
        "addProviderHeader": "x-provider",
        "modelToHeader": "x-model",
        "autoRouting": {"enable": True, "defaultModel": "none", "rules": [{"pattern": "(?i)\\bcode\\b", "model": "coder"}]},
    }
    with serving(stage, stage.plugin("gpustack-generic-proxy-router", config)) as gateway:
        _, auto = arriving(stage, lambda: gateway.chat("write some code", model="higress/auto"))
        _, split = arriving(stage, lambda: gateway.chat(model="openai/gpt-4"))
        got = (json.loads(auto["body"])["model"], header(auto, "x-higress-llm-model"))
        parts = (json.loads(split["body"])["model"], header(split, "x-provider"), header(split, "x-model"))
        expect(got == ("coder", "coder"), f"the worker got {got}")
        expect(parts == ("gpt-4", "openai", "gpt-4"), f"the worker got {parts}")
        return f"the worker got the model {got[0]!r}, then {parts[0]!r} of provider {parts[1]!r}"


@case(["gpustack-ip-acl"], "chats from an allowed and from a denied address of one consumer, and by another consumer")
def ip_acl(stage):
    config = {"realIPHeader": "x-client-ip", "consumers": {"alice": {"allowedCidrs": ["10.0.0.0/8"], "deniedCidrs": ["10.9.0.0/16"]}}}
    with serving(stage, stage.plugin("gpustack-ip-acl", config)) as gateway:
        from_ = lambda ip, who: gateway.chat(headers={"x-client-ip": ip, "x-mse-consumer": who}).status
        got = (from_("10.1.2.3", "alice"), from_("10.9.2.3", "alice"), from_("192.168.0.1", "alice"), from_("192.168.0.1", "bob"))
        expect(got == (200, 403, 403, 200), f"{got}")
        return f"10.1.2.3: {got[0]}, 10.9.2.3: {got[1]}, 192.168.0.1: {got[2]}; the other: {got[3]}"


def candidates(weights=None):
    found = [{"cluster": f"outbound|80||w{at}.static", "targetId": str(at)} for at in range(2)]
    for candidate, weight in zip(found, weights or []):
        candidate["weight"] = weight
    return found


def chain(stage, *rankers, weights=None, mappers=None):
    context = {"mode": "context", "candidates": candidates(weights), "modelMappers": mappers or {}}
    return [
        stage.plugin("gpustack-lb", context, name="lb-context"),
        *rankers,
        stage.plugin("gpustack-lb", {"mode": "finisher"}, name="lb-finisher"),
    ]


def workers_of(gateway, count):
    records = gateway.records()[-count:]
    odd = {record.get("wanted") for record in records} - {"followed"}
    expect(not odd, f"choices that were not followed: {odd}")
    return [record["worker"] for record in records]


@case(["gpustack-lb"], "60 chats with the weights 3 and 1, then 40 chats to candidates without weights", name="gpustack-lb")
def load_balancing(stage):
    with serving(stage, *chain(stage, weights=[3, 1])) as gateway:
        for _ in range(60):
            expect(gateway.chat().status == 200, "a chat failed")
        weighted = Counter(workers_of(gateway, 60))
        # 45 to 15 on average, by the requests' random ids; less than four standard deviations off.
        expect(32 <= weighted["w0"] <= 58, f"{weighted}")
    with serving(stage, *chain(stage)) as gateway:
        for _ in range(40):
            expect(gateway.chat().status == 200, "a chat failed")
        even = Counter(workers_of(gateway, 40))
        expect(min(even["w0"], even["w1"]) >= 15, f"{even}")
    with serving(stage, *chain(stage, weights=[0, 1])) as gateway:
        for _ in range(10):
            expect(gateway.chat().status == 200, "a chat failed")
        only = Counter(workers_of(gateway, 10))
        expect(only == {"w1": 10}, f"{only}")
    return f"{dict(sorted(weighted.items()))}, then {dict(sorted(even.items()))}; with the weights 0 and 1 {dict(only)}"


@case(["gpustack-lb-session-affinity"], "four turns of each of eight sessions, and an empty configuration")
def session_affinity(stage):
    ranker = stage.plugin("gpustack-lb-session-affinity", {"sessionKeys": [{"header": "x-session"}]})
    with serving(stage, *chain(stage, ranker)) as gateway:
        turns = [f"s{session}" for _ in range(4) for session in range(8)]
        for session in turns:
            expect(gateway.chat(headers={"x-session": session}).status == 200, "a chat failed")
        places = {}
        for session, worker in zip(turns, workers_of(gateway, len(turns))):
            places.setdefault(session, set()).add(worker)
    expect(all(len(place) == 1 for place in places.values()), f"{places}")
    used = {worker for place in places.values() for worker in place}
    expect(len(used) == 2, f"all sessions on {used}")
    words = refused(stage, stage.plugin("gpustack-lb-session-affinity"), "the plugin refuses its configuration")
    return f"every session on one worker, all on {sorted(used)}; the empty configuration: {words}"


@contextlib.contextmanager
def stopped(stage, worker):
    """Nothing moves on that worker meanwhile: what it has in flight stays there. Its probes stay well."""

    def control(kind):
        fault = json.dumps({"kind": kind}).encode()
        urllib.request.urlopen(f"{stage.workers.urls[int(worker[1:])]}/_sim/fault", fault, timeout=30).close()

    control("wedge")
    try:
        yield
    finally:
        control("unwedge")


@case(["gpustack-lb-least-load"], "a chat that takes long, and six beside it")
def least_load(stage):
    # Some three seconds at the speed of these workers: enough to find where it is, and to stop it there.
    tokens = 24_000
    ranker = stage.plugin("gpustack-lb-least-load", {})
    with serving(stage, *chain(stage, ranker)) as gateway, ThreadPoolExecutor(1) as beside:
        slow = beside.submit(gateway.chat, f"[[sim:tokens={tokens}]]", max_tokens=tokens)
        busy, end = None, time.monotonic() + 30
        while busy is None:
            if slow.done():
                raise Wrong(f"the long chat is over already: {slow.result().status}")
            expect(time.monotonic() < end, "no worker has the long chat in flight")
            views = json.loads(gateway.page("/workers"))["workers"]
            busy = next((view["id"] for view in views if view["in_flight"] > 0), None)
        with stopped(stage, busy):
            for _ in range(6):
                expect(gateway.chat().status == 200, "a chat failed")
            expect(not slow.done(), "the long chat was over too early")
        expect(slow.result().status == 200, "the long chat failed")
        others = [record["worker"] for record in gateway.records() if record["completion_tokens"] < tokens]
    expect(len(others) == 6, f"{len(others)} chats beside the long one")
    expect(busy not in others, f"the long one on {busy}, the others on {others}")
    return f"the long one on {busy}, the others on {sorted(set(others))}"


@case(["gpustack-lb-decision-service"], "chats while the decision service is sure of one model, then of the other")
def decision_service(stage):
    config = {
        "modelSelection": {"criteria": {"small": "fast and cheap", "large": "thinks"}},
        "provider": {"endpoint": "http://service", "cluster": "outbound|80||service.static", "apiTokens": ["key"]},
        "decisionTimeoutMs": 10000,
    }
    ranker = stage.plugin("gpustack-lb-decision-service", config, upstreams=["service"])
    mappers = {"0": {"*": "small"}, "1": {"*": "large"}}
    seen = []
    with serving(stage, *chain(stage, ranker, mappers=mappers)) as gateway:
        for model in ("small", "large"):
            other = "large" if model == "small" else "small"
            stage.service.verdict = {"choice": model, "probabilities": {model: 0.95, other: 0.05}, "confidence": 0.9}
            calls = len(stage.service.calls)
            for turn in range(4):
                _, got = arriving(stage, lambda: gateway.chat("Which?", headers={"x-higress-llm-model": "sim"}))
            asked = [call for call in stage.service.calls[calls:] if call["path"] == "/v1/systemone"]
            expect(len(asked) == 4, f"{len(asked)} questions to the decision service")
            workers = set(workers_of(gateway, 4))
            seen.append((model, workers, json.loads(got["body"])["model"]))
    expect(seen == [("small", {"w0"}, "small"), ("large", {"w1"}, "large")], f"{seen}")
    return "; ".join(f"{model}: all on {''.join(workers)}, which got the model {got!r}" for model, workers, got in seen)


@case(["gpustack-rate-limit"], "three chats a minute by a consumer that has two, and one by another")
def rate_limit(stage):
    config = {
        "rule_name": "third-party",
        "limit_combinations": [
            {"name": "per-consumer", "match": [{"source": "header", "name": "x-user", "value": "*"}], "query_limits": {"per_minute": 2}}
        ],
        "redis": {"service_name": "redis.static", "service_port": 6379, "timeout": 10000},
    }
    with serving(stage, stage.plugin("gpustack-rate-limit", config, upstreams=["redis"])) as gateway:
        ask = lambda user: gateway.chat(headers={"x-user": user}).status
        got = (ask("a"), ask("a"), ask("a"), ask("b"))
        keys = stage.redis.keys()
        expect(got == (200, 200, 429, 200), f"{got}, keys {keys}")
        expect(len(keys) >= 2, f"Redis has {keys}")
        return f"{got[0]}, {got[1]}, {got[2]}; the other: {got[3]}; Redis has {len(keys)} keys"


@case(["gpustack-set-header-pre-route"], "a chat, and a request on another path")
def set_header(stage):
    config = {"routeNameHeader": "x-route", "clusterNameHeader": "x-cluster", "enableOnPathSuffix": ["/chat/completions"]}
    with serving(stage, stage.plugin("gpustack-set-header-pre-route", config)) as gateway:
        _, got = arriving(stage, gateway.chat)
        seen = (header(got, "x-route"), header(got, "x-cluster"))
        expect(seen[0] == "chat" and (seen[1] or "").startswith("default"), f"the worker got {seen}")
        body = {"model": "sim", "prompt": "Hello", "max_tokens": 4}
        expect(gateway.post("/v1/completions", body).status == 200, "a completion failed")
        other = stage.arrived("/v1/completions")[-1]
        expect(header(other, "x-route") is None, f"on another path the worker got {header(other, 'x-route')!r}")
        return f"the worker got the route {seen[0]!r} and the cluster {seen[1]!r}, on the other path neither"


@case(["gpustack-token-usage"], "a streamed chat that does not ask for usage")
def token_usage(stage):
    with serving(stage, stage.plugin("gpustack-token-usage", {"realIPHeader": "x-real-client"})) as gateway:
        answer, got = arriving(stage, lambda: gateway.chat(stream=True))
        asked = json.loads(got["body"]).get("stream_options", {})
        usage = next((event["usage"] for event in reversed(answer.events()) if event.get("usage")), {})
        rates = {name: usage[name] for name in ("time_to_first_token_ms", "time_per_output_token_ms", "tokens_per_second") if name in usage}
        expect(asked.get("include_usage") is True, f"the worker was asked for {asked}")
        expect(usage.get("completion_tokens", 0) > 0 and len(rates) == 3, f"the client got usage {usage}")
        return f"the worker was asked to include usage; the client got {usage['completion_tokens']} tokens with {', '.join(rates)}"


@case(["transformer"], "a chat with headers to remove, rename and add, and an empty configuration")
def transformer(stage):
    rules = lambda headers: [{"operate": operate, "headers": [entry]} for operate, entry in headers]
    config = {
        "reqRules": rules([("remove", {"key": "x-gone"}), ("rename", {"oldKey": "x-old", "newKey": "x-new"}), ("add", {"key": "x-added", "value": "1"})]),
        "respRules": rules([("add", {"key": "x-answered", "value": "yes"})]),
    }
    with serving(stage, stage.plugin("transformer", config)) as gateway:
        answer, got = arriving(stage, lambda: gateway.chat(headers={"x-gone": "a", "x-old": "b"}))
        seen = {name: header(got, name) for name in ("x-gone", "x-old", "x-new", "x-added")}
        expect(seen == {"x-gone": None, "x-old": None, "x-new": "b", "x-added": "1"}, f"the worker got {seen}")
        expect(answer.headers.get("x-answered") == "yes", f"the client got {answer.headers}")
    words = refused(stage, stage.plugin("transformer"), "the plugin refuses its configuration")
    return f"the worker got x-new: b and x-added: 1 only, the client x-answered: yes; the empty configuration: {words}"
