"""Requests, and a call_next that responds by a script."""

import asyncio

import numpy as np

from slime_core.types.completion import Completion, FinishReason, GenerateRequest, SamplingParams
from slime_core.types.sample import VersionSpan


def request(name="a", token_ids=(1, 2), **fields):
    return GenerateRequest(
        **{
            "request_id": name,
            "token_ids": np.array(token_ids, np.int32),
            "sampling": SamplingParams(max_new_tokens=8),
            "seed": 0,
            **fields,
        }
    )


def respond(asked, token_ids=(7, 8), version=3, **fields):
    token_ids = np.array(token_ids, np.int32)
    return Completion(
        **{
            "request_id": asked.request_id,
            "token_ids": token_ids,
            "log_probs": -token_ids.astype(np.float32) / 8,
            "finish_reason": FinishReason.STOP,
            "spans": (VersionSpan(version, 0, len(token_ids)),),
            **fields,
        }
    )


class Held:
    """Records requests in order; `finish` responds to them."""

    def __init__(self):
        self.seen = []
        self.open = {}

    @property
    def names(self):
        return [one.request_id for one in self.seen]

    async def __call__(self, asked):
        self.seen.append(asked)
        done = self.open[asked.request_id] = asyncio.get_running_loop().create_future()
        try:
            return await done
        finally:
            del self.open[asked.request_id]

    async def finish(self, *names, **fields):
        for name in names:
            (asked,) = [one for one in self.seen if one.request_id == name]
            self.open[name].set_result(respond(asked, **fields))
        await settle()


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


async def start(middleware, held, *requests):
    tasks = [asyncio.create_task(middleware(one, held)) for one in requests]
    await settle()
    return tasks
