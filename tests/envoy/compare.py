"""Asks the same of one filter on Envoy and on Turnstile, and compares what client, worker and log saw.

The exchanges are in exchanges.toml. A difference has to be explained there; one that is not, and an explanation that nothing
needs any more, fail the run.
"""

import argparse
import difflib
import fnmatch
import http.client
import json
import pathlib
import socket
import sys
import tomllib

import gateway
import proxies
import upstreams


PAGE = """# One filter, two hosts

A filter made with the public Rust SDK (`policies/test-guests/shapes`) runs unchanged on Envoy 1.40 and on Turnstile; both are
asked the same, and what the client gets, what the worker gets and what the filter logs is compared, field by field. This page
is written by `make compare-envoy`, which fails on a difference that `tests/envoy/exchanges.toml` does not explain. Headers that a
proxy adds for itself (`date`, `server`, `x-request-id`, forwarded-for and the like) and framing are left out.

"""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turnstile", required=True)
    parser.add_argument("--envoy", required=True)
    parser.add_argument("--module", required=True)
    parser.add_argument("--only", default="", help="only exchanges whose name has this in it")
    parser.add_argument("--markdown", help="writes the table there")
    options = parser.parse_args()
    with open(pathlib.Path(__file__).with_name("exchanges.toml"), "rb") as file:
        book = tomllib.load(file)
    origin, auth, grpc = upstreams.Origin(), upstreams.Auth(), upstreams.Grpc()
    ports = {"origin": origin.port, "auth": auth.port, "grpc": grpc.port, "closed": gateway.free_port()}
    results = []
    for shape in book["shape"]:
        asked = [exchange for exchange in shape["exchange"] if options.only in f"{shape['name']}: {exchange['name']}"]
        if asked:
            results += compare(options, shape, asked, book, origin, ports)
    return report(results, options.markdown)


def compare(options, shape, exchanges, book, origin, ports):
    configuration = json.dumps({"shape": shape["name"], **shape.get("config", {})})
    seen = {"envoy": [], "turnstile": []}
    # One that ends the filter's instance on a host has the proxies for itself.
    together = [exchange for exchange in exchanges if not exchange.get("alone")]
    groups = [group for group in [together, *([exchange] for exchange in exchanges if exchange.get("alone"))] if group]
    for name, start in (("envoy", proxies.envoy), ("turnstile", proxies.turnstile)):
        for group in groups:
            proxy = start(getattr(options, name), options.module, configuration, ports)
            try:
                seen[name] += [observe(proxy, shape, exchange, book, origin) for exchange in group]
            finally:
                proxy.stop()
    results = []
    for exchange, ours, theirs in zip([e for group in groups for e in group], seen["turnstile"], seen["envoy"]):
        known = exchange.get("differs", []) + shape.get("differs", [])
        explained, unexplained, used = [], [], set()
        for field in sorted(ours.keys() | theirs.keys()):
            pair = (theirs.get(field), ours.get(field))
            if pair[0] == pair[1]:
                continue
            if field == "log":
                pair = only(*pair)
            place = next((n for n, d in enumerate(known) if fnmatch.fnmatchcase(field, d["field"])), None)
            if place is not None:
                used.add(place)
                explained.append((field, *pair, known[place]["why"]))
                continue
            why, left = anywhere(book["everywhere"], field, pair)
            if left:
                unexplained.append((field, *left))
            else:
                explained.append((field, *pair, "; ".join(why)))
        stale = [d["field"] for n, d in enumerate(exchange.get("differs", [])) if n not in used]
        results.append((f"{shape['name']}: {exchange['name']}", len(ours.keys() | theirs.keys()), explained, unexplained, stale))
    return results


def anywhere(everywhere, field, pair):
    """Which general explanations apply, and what they leave unexplained: nothing, or a pair."""
    why, left = [], pair
    for rule in everywhere:
        if rule["field"] != field:
            continue
        if "lines" in rule:
            rest = tuple([line for line in side if not fnmatch.fnmatchcase(line, rule["lines"])] for side in left)
        else:
            rest = ([], []) if left[0] is None and rule["only_if_absent_on"] == "envoy" else left
        if rest != left:
            why.append(rule["why"])
            left = rest
    return why, None if why and not any(left) else left


def only(theirs, ours):
    """The lines that only one of them has."""
    changes = list(difflib.ndiff(theirs, ours))
    return [line[2:] for line in changes if line[0] == "-"], [line[2:] for line in changes if line[0] == "+"]


def observe(proxy, shape, exchange, book, origin):
    """Everything that an exchange shows, as a flat table."""
    if exchange.get("start"):
        proxy.process.until(lambda: exchange["until"] in proxy.logged() or None)
        # A host may start the filter several times, and each tells the same.
        return {"log": sorted(set(proxy.settled(0)))}
    start = len(proxy.logged())
    mark = f"{shape['name']}: {exchange['name']}"
    answer = ask(proxy.port, exchange, mark)
    seen = {f"client.{key}": value for key, value in flat(answer, book["own"]["client"]).items()}
    with origin.lock:
        reached = origin.seen.pop(mark, [])
    seen["worker.times reached"] = len(reached)
    for request in reached[:1]:
        seen |= {f"worker.{key}": value for key, value in flat(request, book["own"]["worker"]).items()}
    seen["log"] = proxy.settled(start)
    for line in book["own"]["log"]:
        seen["log"] = [said for said in seen["log"] if not fnmatch.fnmatchcase(said, line)]
    return seen


def flat(message, own):
    seen = {key: value for key, value in message.items() if key not in ("headers", "body")}
    for header, value in message["headers"]:
        if header not in own:
            seen.setdefault(f"header {header}", []).append(value)
    body = message["body"]
    try:
        parsed = json.loads(body)
    except ValueError:
        parsed = None
    if isinstance(parsed, dict):
        # Byte for byte where both leave it alone; by members, so that one that a host adds can be told from the rest.
        seen["body's beginning"] = body[:12].decode("latin-1")
        seen |= {f"body {key}": value if len(str(value)) < 200 else f"{len(str(value))} characters" for key, value in parsed.items()}
    else:
        seen["body"] = body.decode("latin-1") if len(body) < 200 else f"{len(body)} bytes, {body[:20].decode('latin-1')}…"
    return seen


def ask(port, exchange, mark):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    method = exchange.get("method", "POST")
    connection.putrequest(method, exchange.get("path", "/tokenize"), skip_host=True, skip_accept_encoding=True)
    connection.putheader("host", "gateway.test")
    connection.putheader("x-exchange", mark)
    for name, value in exchange.get("headers", []):
        connection.putheader(name, value.encode("latin-1"))
    body = exchange.get("body", '{"padding":"abcdef","model":"m","prompt":"p"}').encode() if method == "POST" else b""
    if times := exchange.get("body_padding"):
        body = body.replace(b"abcdef", b"abcdef" * times)
    if body:
        connection.putheader("content-type", "application/json")
    pieces = exchange.get("pieces")
    if pieces:
        connection.putheader("transfer-encoding", "chunked")
    elif method == "POST":
        connection.putheader("content-length", str(len(body)))
    connection.endheaders()
    if pieces:
        step = max(1, len(body) // pieces)
        for start in range(0, len(body), step):
            piece = body[start : start + step]
            connection.send(b"%x\r\n%s\r\n" % (len(piece), piece))
        connection.send(b"0\r\n\r\n")
    elif body:
        connection.send(body)
    try:
        answer = connection.getresponse()
        headers = [(key.lower(), value) for key, value in answer.getheaders()]
        return {"status": answer.status, "headers": headers, "body": answer.read()}
    except (http.client.HTTPException, ConnectionError, socket.timeout) as error:
        return {"status": type(error).__name__, "headers": [], "body": b""}
    finally:
        connection.close()


def report(results, markdown):
    wrong = 0
    table = ["| exchange | compared | different | why |", "| --- | --- | --- | --- |"]
    for name, compared, explained, unexplained, stale in results:
        bad = bool(unexplained or stale)
        wrong += bad
        print(f"{'FAIL' if bad else 'ok  '} {name}: {compared} fields, {len(explained)} differ and are explained")
        for field, envoy, ours, why in explained:
            print(f"       {field}: {short(envoy)} on Envoy, {short(ours)} here: {why}")
        for field, envoy, ours in unexplained:
            print(f"  !!   {field}: {envoy!r} on Envoy, {ours!r} here: NOT EXPLAINED")
        for field in stale:
            print(f"  !!   {field}: an explanation that nothing needs")
        whys = list(dict.fromkeys(why for *_, why in explained))
        fields = ", ".join(dict.fromkeys(f"`{field}`" for field, *_ in explained))
        table.append(f"| {name} | {compared} | {fields or '–'} | {'; '.join(whys) or '–'} |")
    print(f"{len(results)} exchanges, {sum(r[1] for r in results)} fields compared, {wrong} exchanges with something unexplained")
    if markdown:
        pathlib.Path(markdown).write_text(PAGE + "\n".join(table) + "\n", encoding="utf-8")
    return 1 if wrong or not results else 0


def short(value):
    text = repr(value) if value is not None else "nothing"
    return text if len(text) <= 90 else text[:87] + "…"


if __name__ == "__main__":
    sys.exit(main())
