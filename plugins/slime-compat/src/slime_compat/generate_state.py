"""GenerateState: what old generate and rollout functions take the tokenizer and the sampling parameters from."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from slime_compat.requests import current, sampling_params_of
from slime_compat.rollout_call import generate_and_rm_group

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class GenerateState:
    """Gives old functions the tokenizer. Each call makes a new one, which belongs to the episode or the step."""

    def __init__(self, args: Any) -> None:
        episode = current("GenerateState").episode
        self.args = args
        self.tokenizer: PreTrainedTokenizerBase = episode.tokenizer
        self.processor = None
        self.prompt_ids: list[int] = episode.prompt.token_ids.tolist()
        self.sampling_params = sampling_params_of(episode.sampling)
        self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency)
        self.dp_rank = 0
        self.reset()

    def reset(self) -> None:
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task[Any]] = set()
        self.aborted = False

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """The run chooses the engine of a request."""
        yield self.dp_rank

    def submit_generate_tasks(self, samples: list[list[Any]]) -> None:
        """Starts the groups; their tasks are in `pendings`."""
        for group in samples:
            started = generate_and_rm_group(self.args, group, self.sampling_params.copy(), evaluation=False)
            self.pendings.add(asyncio.create_task(started))
        self.remaining_batch_size += len(samples)
