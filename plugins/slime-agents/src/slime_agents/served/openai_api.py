"""OpenAI's chat completions API: parses requests, formats responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from slime_agents.served.session import Call, Reply

MODEL = "slime"


class ChatRequest(BaseModel):
    """The fields of a request that have an effect. Temperature, top_p, seed and others are ignored: the run sets them."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore")

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_tokens: int | None = Field(None, gt=0)
    max_completion_tokens: int | None = Field(None, gt=0)
    stop: str | list[str] | None = None
    n: int | None = Field(1, ge=1, le=128)
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = False

    def call(self) -> Call:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Call(
            messages=self.messages,
            tools=None if self.tool_choice == "none" else self.tools,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=tuple(stop),
        )


def message(reply: Reply) -> dict[str, Any]:
    written = reply.message
    shown: dict[str, Any] = {"role": "assistant", "content": written.content, "refusal": None}
    if written.tool_calls:
        shown["content"] = written.content or None
        shown["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in written.tool_calls
        ]
    return shown


def chat_completion(replies: list[Reply], request: ChatRequest, tokens_of: Any, created: int) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{replies[0].number}",
        "object": "chat.completion",
        "created": created,
        "model": MODEL,
        "choices": [
            {
                "index": index,
                "message": message(reply),
                "finish_reason": reply.finish,
                "logprobs": log_probs(reply, tokens_of) if request.logprobs else None,
            }
            for index, reply in enumerate(replies)
        ],
        "usage": usage(replies),
    }


def usage(replies: list[Reply]) -> dict[str, int]:
    written = sum(len(reply.completion.token_ids) for reply in replies)
    prompt = replies[0].prompt_tokens
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def log_probs(reply: Reply, tokens_of: Any) -> dict[str, Any]:
    """Log-probs of the sampled tokens only."""
    pairs = zip(reply.completion.token_ids.tolist(), reply.completion.log_probs.tolist(), strict=True)
    rows = [(tokens_of([token]), value) for token, value in pairs]
    content = [{"token": t, "logprob": v, "bytes": list(t.encode()), "top_logprobs": []} for t, v in rows]
    return {"content": content, "refusal": None}


def events(replies: list[Reply], request: ChatRequest, created: int) -> Iterator[bytes]:
    """The responses as server-sent events."""
    head = {
        "id": f"chatcmpl-{replies[0].number}",
        "object": "chat.completion.chunk",
        "created": created,
        "model": MODEL,
    }
    for index, reply in enumerate(replies):
        delta = message(reply)
        for number, call in enumerate(delta.get("tool_calls", [])):
            call["index"] = number
        yield event({**head, "choices": [{"index": index, "delta": delta, "finish_reason": None}]})
        yield event({**head, "choices": [{"index": index, "delta": {}, "finish_reason": reply.finish}]})
    if (request.stream_options or {}).get("include_usage"):
        yield event({**head, "choices": [], "usage": usage(replies)})
    yield b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def error(text: str, code: str) -> dict[str, Any]:
    return {"error": {"message": text, "type": code, "param": None, "code": code}}
