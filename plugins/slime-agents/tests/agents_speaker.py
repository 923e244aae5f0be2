"""An engine that speaks: its responses are texts, made by the test from the text so far."""

import asyncio
from collections.abc import Callable

import numpy as np

from slime_core.rollout.episode import EngineEpisode
from slime_core.types.completion import FinishReason, SamplingParams
from slime_core.types.prompt import Prompt
from slime_models.new_model import character_tokenizer
from slime_plugin_kit.scripted_engine import ScriptedEngine
from slime_plugin_kit.scripted_rollout import client_of

TOKENIZER = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
END = TOKENIZER.eos_token

TOKENIZER.chat_template = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}<assistant>"
)


def decode(tokens):
    return TOKENIZER.decode(tokens)


def encode(text):
    return np.array(TOKENIZER.encode(text, add_special_tokens=False), np.int32)


def episode_with(
    engine, *, text="6*7=", budget=400, stop=None, kept=None, messages=None, evaluation=False, metadata=None, **more
):
    """The kernel's own, of one character a token."""
    fields = {"label": "42", "messages": messages, "metadata": metadata or {"from": "a test"}}
    prompt = Prompt(group_index=3, text=text, token_ids=encode(text), **fields)
    settings = {
        "index": 12, "position": 0, "scope": "train", "attempt": 0, "seed": 5, "stop": stop or asyncio.Event(),
        "sampling": SamplingParams(max_new_tokens=budget), "max_context_len": None, "tokenizer": TOKENIZER, "kept": kept,
    }  # fmt: skip
    return EngineEpisode(prompt=prompt, client=client_of(engine), evaluation=evaluation, **{**settings, **more})


class Speaker(ScriptedEngine):
    """Every response ends at a stop string, with the budget, or with the end token."""

    def __init__(self, reply: Callable[[str], str], *, tokenizer=TOKENIZER, **options):
        super().__init__(vocab_size=len(tokenizer), **options)
        self._tokenizer = tokenizer
        self.heard: list[str] = []
        self.requests = []
        self._reply = reply

    def script(self, request):
        text = self._tokenizer.decode(request.token_ids)
        self.heard.append(text)
        self.requests.append(request)
        reply = self._reply(text)
        ends = [reply.index(stop) + len(stop) for stop in request.sampling.stop if stop in reply]
        tokens = self._tokenizer.encode(reply[: min(ends)] if ends else reply, add_special_tokens=False)
        if not ends:
            tokens.append(self._tokenizer.eos_token_id)
        budget = request.sampling.max_new_tokens
        reason = FinishReason.LENGTH if len(tokens) > budget else FinishReason.STOP
        return np.array(tokens[:budget], np.int32), reason
