"""An agent as Turnstile's users have them: the OpenAI client with another base URL, and `nvext` in `extra_body`."""

import dataclasses
import json
import uuid

import httpx
from openai import OpenAI

import sse
from rig import MODEL
from recorder import Exchange

# The weights are random, so what is written is bounded by a grammar. With `enable_thinking` the grammar would begin after
# the reasoning only; without it SGLang's parser still takes apart what looks like reasoning.
ANSWER = "[a-z ]{80}"
# As long as agents' system prompts are, in proportion: several blocks of the gateway's prefix index.
INSTRUCTIONS = "You are a helpful assistant. Compare the results of the research and write a short summary. " * 18
NO_GRAMMAR_DELAY = {"enable_thinking": False}


@dataclasses.dataclass
class Turn:
    """What the client saw of one turn, and what the worker did."""

    text: str
    tool_calls: list
    chunks: list
    response: sse.Kept
    exchange: Exchange

    @property
    def request_id(self):
        return self.response.headers.get("x-request-id")

    @property
    def usage(self):
        """The usage that the worker reported, whoever asked for it."""
        return reported_usage(self.exchange)

    @property
    def cached(self):
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def reported_usage(exchange):
    """The usage in a worker's answer to a chat request, streamed or not."""
    if exchange.answer.startswith(b"{"):
        return json.loads(exchange.answer).get("usage") or {}
    for event in reversed(sse.events(exchange.answer)):
        payload = sse.data(event)
        if payload and payload.get("usage"):
            return payload["usage"]
    return {}


class Agent:
    """One conversation through the gateway. `key` is its credential: sessions of different ones never meet."""

    def __init__(self, rig, key="sk-agent-1"):
        self._rig = rig
        self._tee = sse.Tee()
        self._client = OpenAI(
            base_url=f"{rig.gateway.url}/v1",
            api_key=key,
            max_retries=0,
            http_client=httpx.Client(transport=self._tee, timeout=120),
        )
        # Unlike any other, so that nothing of it is cached before.
        self.messages = [{"role": "system", "content": f"{uuid.uuid4().hex} {INSTRUCTIONS}"}]

    def turn(self, text, nvext=None, regex=ANSWER, leave_after=None, **arguments):
        """Sends the history and `text`, streaming; adds the answer to the history. With `leave_after` the client hangs
        up after that many chunks."""
        if text is not None:
            self.messages.append({"role": "user", "content": text})
        extra = {"regex": regex, "chat_template_kwargs": NO_GRAMMAR_DELAY, **arguments.pop("extra_body", {})}
        if nvext is not None:
            extra["nvext"] = nvext
        mark = self._rig.recorder.mark()
        stream = self._client.chat.completions.create(
            model=MODEL,
            messages=self.messages,
            temperature=0,
            max_tokens=arguments.pop("max_tokens", 200),
            stream=True,
            extra_body=extra,
            extra_headers={"x-turnstile-explain": "1", **arguments.pop("extra_headers", {})},
            **arguments,
        )
        chunks = []
        for chunk in stream:
            chunks.append(chunk)
            if leave_after is not None and len(chunks) >= leave_after:
                stream.close()
                break
        exchange = self._rig.recorder.since(mark, "/v1/chat/completions")[0]
        written = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        calls = tool_calls(chunks)
        if leave_after is None:
            answer = {"role": "assistant", "content": written or None}
            if calls:
                answer["tool_calls"] = calls
            self.messages.append(answer)
        return Turn(written, calls, chunks, self._tee.responses[-1], exchange)


def tool_calls(chunks):
    """The calls of a streamed answer, put together from their pieces."""
    calls = {}
    for chunk in chunks:
        for piece in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            call = calls.setdefault(
                piece.index, {"id": piece.id, "type": "function", "function": {"name": "", "arguments": ""}}
            )
            call["function"]["name"] += piece.function.name or ""
            call["function"]["arguments"] += piece.function.arguments or ""
    return [calls[index] for index in sorted(calls)]
