"""Sampling: asample requests, any number at once. Draws depend on the sampling session, seq_id and the number of the sample, or
on the seed that was sent and the number."""

from __future__ import annotations

import asyncio
import math
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from tinker.types import SampleRequest
from tinker.types import SamplingParams as AskedParams

from slime_core.errors import CheckpointError, ModelError, SlimeError, StorageError
from slime_core.rollout.seeds import request_seed
from slime_core.types.completion import Completion, FinishReason, SamplingParams
from slime_tinker.admission import Admission
from slime_tinker.checkpoints import Checkpoints
from slime_tinker.errors import RequestError
from slime_tinker.futures import Futures, failure
from slime_tinker.holdings import Holdings
from slime_tinker.journal import Journal, body_dropped_of
from slime_tinker.models import BaseModel, Models, PromptScores, SamplerWeights
from slime_tinker.notes import note
from slime_tinker.records import CheckpointRecord, Outcome, RequestRecord, SamplerRecord
from slime_tinker.results import sample_outcome
from slime_tinker.sampler_weights import OpenWeights
from slime_tinker.settings import Limits
from slime_tinker.training import SERVERS_FAULT
from slime_tinker.training_data import require_vocabulary

MAX_TOP_K: Final = 128
TOKEN_BYTES: Final = 8
"""Of a token and its log-prob in a result."""
MAX_RESULT_BYTES: Final = 512 * 2**20
"""SQLite holds no more than 1,000,000,000 bytes in one place."""
UNSERVED: Final = {
    "target_prompt_logprobs": "log-probs of other tokens in the prompt's places are not served here. Leave it out: "
    "topk_prompt_logprobs has the likeliest tokens, and forward with cross_entropy has those of any target_tokens (N, K)",
    "prompt_alt_tokens_k": "draws in the prompt's places are not served here. Leave it out: topk_prompt_logprobs has the "
    "likeliest tokens",
    "record_stability_info": "what stable_reinforce needs is not served here. Leave it out",
}
"""Fields of a request, and why they are refused."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """A checked request."""

    prompt: list[int]
    sampling: SamplingParams
    seeds: list[int]
    prompt_log_probs: bool
    top_k: int
    """Of the prompt's tokens."""
    last_n: int | None
    sample_top_k: int
    """Of the sampled tokens."""


@dataclass(slots=True)
class Sampling:
    models: Models
    holdings: Holdings
    journal: Journal
    futures: Futures
    checkpoints: Checkpoints
    open_weights: OpenWeights
    admission: Admission
    limits: Limits
    tasks: asyncio.TaskGroup
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def submit(self, record: RequestRecord) -> None:
        """A second request with the same id is the first."""
        if await self.futures.accept(record):
            self._start(record)

    async def restore(self) -> None:
        """What had no result when the server ended."""
        for record in await self.journal.requests("kind = 'asample' and done is null"):
            self.futures.expect(record)
            self._start(record)

    async def cancel(self, request_id: str, why: str) -> None:
        """Ends the work; the result has the reason."""
        task = self._running.pop(request_id, None)
        if task is not None and not task.done():
            task.cancel()
            await self.futures.resolve(request_id, failure(why, user=True), [body_dropped_of(request_id)])

    def stop(self) -> None:
        """The server ends: what has no result begins again with the next."""
        for task in self._running.values():
            task.cancel()

    async def cancel_of(self, sampler: str, why: str) -> None:
        for request_id in [name for name in self._running if name.rpartition(":")[0] == sampler]:
            await self.cancel(request_id, why)

    def _start(self, record: RequestRecord) -> None:
        task = self.tasks.create_task(self._run(record))
        self._running[record.id] = task
        task.add_done_callback(lambda ended: self._running.pop(record.id, None))

    async def _run(self, record: RequestRecord) -> None:
        try:
            async with self.futures.ended_by(record.id):
                outcome = await self._sample(record)
        except SlimeError as error:
            outcome = failure(str(error), user=not isinstance(error, SERVERS_FAULT))
        await self.futures.resolve(record.id, outcome, [body_dropped_of(record.id)])

    async def _sample(self, record: RequestRecord) -> Outcome:
        request = SampleRequest.model_validate_json(record.body)
        asked = checked(request, record, self.models.base, self.limits)
        if request.sampling_params.seed is not None and not self.models.draws_by_seed:
            raise RequestError(
                f"sampling_params.seed = {request.sampling_params.seed}: this server's engine draws without seeds. Leave it "
                "out; engine sglang draws by seed with engine.deterministic = true."
            )
        sampler = self.holdings.sampler(record.owner, record.tenant)
        async with AsyncExitStack() as stack:
            # Before the weights: those who wait for a place would keep the engines' room for weights from other tenants.
            await stack.enter_async_context(self.admission.place(record.tenant, len(asked.seeds)))
            weights = await self._weights(sampler, stack)
            work = asyncio.wrap_future(self.models.start_sampling(weights, asked.prompt, asked.sampling, asked.seeds))
            # Also if the scores fail, or the request is cancelled while it waits for them.
            stack.callback(work.cancel)
            scores: PromptScores | None = None
            if asked.prompt_log_probs or asked.top_k:
                scores = await asyncio.wrap_future(self.models.prompt_scores(weights, asked.prompt, asked.top_k))
            completions = await work
            likeliest = None
            if asked.sample_top_k:
                likeliest = [await self._likeliest(weights, asked, completion) for completion in completions]
        if any(completion.finish_reason is FinishReason.ABORT for completion in completions):
            raise RequestError("the request was aborted while it ran.")
        return sample_outcome(completions, scores, asked.last_n, likeliest)

    async def _weights(self, sampler: SamplerRecord, stack: AsyncExitStack) -> SamplerWeights | None:
        """None: the base."""
        folder = self.models.base_weights
        if sampler.checkpoint is not None:
            folder = self.checkpoints.folder_of(self._checkpoint(sampler.id, sampler.checkpoint).folder)
        if folder is None:
            return None
        try:
            return await stack.enter_async_context(self.open_weights.using(folder))
        except (ModelError, CheckpointError) as error:
            if sampler.checkpoint is not None:
                # They may have been deleted while the request waited for others to be closed.
                self._checkpoint(sampler.id, sampler.checkpoint)
            note(f"{sampler.checkpoint or 'the base'}: its weights cannot be read: {error}")
            raise StorageError(
                f"sampling_session_id {sampler.id}: the server cannot read its weights. Save the model again, and create "
                "another sampling client."
            ) from error

    def _checkpoint(self, sampler: str, path: str) -> CheckpointRecord:
        """RequestError for one that was deleted."""
        found = self.holdings.checkpoints.get(path)
        if found is None:
            kept = self.limits.snapshots(whole=self.models.whole)
            raise RequestError(
                f"sampling_session_id {sampler}: its weights are deleted ({path}): the newest {kept} of a model without a name "
                "are kept, named ones until they expire. Create another sampling client, of weights that are there."
            )
        return found

    async def _likeliest(self, weights: SamplerWeights | None, asked: Asked, completion: Completion) -> PromptScores:
        """Of the completion's tokens. Engines report the likeliest tokens of prompts alone, so that they read it as one."""
        whole = [*asked.prompt, *completion.token_ids.tolist()]
        scores = await asyncio.wrap_future(self.models.prompt_scores(weights, whole, asked.sample_top_k))
        return scores.last(len(completion.token_ids))


def checked(request: SampleRequest, record: RequestRecord, base: BaseModel, limits: Limits) -> Asked:
    """RequestError for the first thing that is wrong, which it names."""
    for name, why in UNSERVED.items():
        if getattr(request, name):
            raise RequestError(f"{name}: {why}.")
    prompt: list[int] = []
    for place, chunk in enumerate(request.prompt.chunks):
        if chunk.type != "encoded_text":
            raise RequestError(
                f"prompt.chunks[{place}]: {chunk.type}: this server takes token ids (EncodedTextChunk) only."
            )
        prompt += chunk.tokens
    try:
        tokens = np.asarray(prompt, np.int64)
    except OverflowError:
        raise RequestError(f"prompt: a token is outside the vocabulary of {base.vocab_size}.") from None
    require_vocabulary(tokens, base.vocab_size, "prompt")
    if not prompt:
        raise RequestError("prompt: no tokens.")
    room = base.max_length - len(prompt)
    if room < 1:
        raise RequestError(f"prompt: {len(prompt)} tokens, and the model takes {base.max_length} with the response.")
    if not 1 <= request.num_samples <= limits.max_samples:
        raise RequestError(f"num_samples = {request.num_samples}: must be from 1 to {limits.max_samples}.")
    most = min(MAX_TOP_K, base.vocab_size)
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if not 0 <= getattr(request, name) <= most:
            raise RequestError(f"{name} = {getattr(request, name)}: must be from 0 to {most}.")
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and not 1 <= last_n <= len(prompt) - 1:
        raise RequestError(
            f"prompt_logprobs_last_n = {last_n}: must be from 1 to {len(prompt) - 1}, one less than the prompt."
        )
    params = request.sampling_params
    sampling = sampling_of(params, room)
    problem = sampling.problem(base.vocab_size)
    if problem is not None:
        raise RequestError(f"sampling_params: {problem}.")
    size = request.num_samples * sampling.max_new_tokens * TOKEN_BYTES * (1 + request.topk_sample_logprobs)
    if size > MAX_RESULT_BYTES:
        raise RequestError(
            f"num_samples = {request.num_samples}, sampling_params.max_tokens = {sampling.max_new_tokens}, "
            f"topk_sample_logprobs = {request.topk_sample_logprobs}: the result may have {size:,} bytes, more than "
            f"{MAX_RESULT_BYTES:,}. Send the request in parts."
        )
    first = ("seed", params.seed) if params.seed is not None else (record.owner, record.seq)
    return Asked(
        prompt=prompt,
        sampling=sampling,
        seeds=[request_seed("tinker", *first, number) for number in range(request.num_samples)],
        prompt_log_probs=bool(request.prompt_logprobs),
        top_k=request.topk_prompt_logprobs,
        last_n=last_n,
        sample_top_k=request.topk_sample_logprobs,
    )


def sampling_of(params: AskedParams, room: int) -> SamplingParams:
    """`room`: tokens that fit behind the prompt."""
    limit = room if params.max_tokens is None else params.max_tokens
    if limit < 1:
        raise RequestError(f"sampling_params.max_tokens = {limit}: must be 1 or above.")
    if not math.isfinite(params.temperature):
        raise RequestError(f"sampling_params.temperature = {params.temperature}: must be finite.")
    if params.stop is not None and not params.stop:
        raise RequestError(
            "sampling_params.stop = []: generation past the model's end token is not served here; leave it out."
        )
    stop = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
    return SamplingParams(
        max_new_tokens=min(limit, room),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        stop=tuple(text for text in stop if isinstance(text, str)),
        stop_token_ids=tuple(token for token in stop if isinstance(token, int)),
    )
