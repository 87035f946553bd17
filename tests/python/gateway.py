"""A gateway as these scripts start it: its configuration, its log, a port for it."""

import json
import socket


def parsed(line):
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def toml(config):
    """The configuration as TOML, of which inline tables and JSON's strings are a part."""

    def value(item):
        if isinstance(item, dict):
            return "{" + ", ".join(f"{json.dumps(key)} = {value(part)}" for key, part in item.items()) + "}"
        if isinstance(item, list):
            return "[" + ", ".join(map(value, item)) + "]"
        return json.dumps(item)

    return "".join(f"{key} = {value(item)}\n" for key, item in config.items())


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
