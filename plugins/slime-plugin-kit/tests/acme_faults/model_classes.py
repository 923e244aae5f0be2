"""What the drivers of `models` build."""

import asyncio
import contextlib
import itertools
from dataclasses import replace

import numpy as np
import torch
import xxhash

from slime_core.contracts.optimizer import StepSettings
from slime_core.errors import CheckpointError
from slime_core.types.completion import FinishReason
from slime_fsdp.backend import FsdpBackend
from slime_local.engine import LocalEngine


def scaled(objective, factor):
    class Scaled:
        reads_values = objective.reads_values
        needs_entropy = objective.needs_entropy
        entropy_has_gradient = objective.entropy_has_gradient

        def __call__(self, *given, **named):
            output = objective(*given, **named)
            return replace(output, loss=output.loss * factor)

    return Scaled()


class CarelessSums(FsdpBackend):
    """A mean of micro-batches, where a sum belongs; and each token gets the log-prob of the one before."""

    def forward_backward(self, micros, objective):
        super().forward_backward(micros, scaled(objective, 1 / len(micros)))

    def forward_only(self, micros, **asked):
        scores = super().forward_only(micros, **asked)
        return [one if one.log_probs is None else replace(one, log_probs=np.roll(one.log_probs, 1)) for one in scores]


class TwiceTheGradient(FsdpBackend):
    """A factor too much."""

    def forward_backward(self, micros, objective):
        super().forward_backward(micros, scaled(objective, 2))


class Unrepeatable(FsdpBackend):
    """Each call in the process has another factor, which no seed governs. Random ones were now and then too close to differ;
    the golden ratio's multiples keep apart."""

    calls = itertools.count()

    def forward_backward(self, micros, objective):
        super().forward_backward(micros, scaled(objective, 1 + 1e-5 * (next(self.calls) * 0.618034 % 1)))


class CarelessState(FsdpBackend):
    """Loads and sleeps without the optimizer, and renames a tensor on its way out."""

    def load(self, folder):
        super().load(folder)
        self._ready.optimizer.state.clear()

    def sleep(self):
        super().sleep()
        self._ready.optimizer.state.clear()

    def export_weights(self, *, all_ranks=False):
        for layer in super().export_weights(all_ranks=all_ranks):
            yield layer and {name.replace("model.norm.weight", "norm.weight"): layer[name] for name in layer}


class CarelessChecks(FsdpBackend):
    """Takes any checkpoint, stages none, hides what it skips and what overflows, refreshes no copy, teaches no critic, and
    keeps the settings of an earlier step."""

    kept = StepSettings()

    def stage(self, folder):
        return lambda: self.save(folder)

    def load(self, folder):
        with contextlib.suppress(CheckpointError):
            super().load(folder)

    def forward_backward(self, micros, objective):
        super().forward_backward(micros, scaled(objective, 0.0) if objective.reads_values else objective)

    def optim_step(self, settings=StepSettings()):
        self.kept = self.kept if settings.lr is None else settings
        return replace(super().optim_step(self.kept), skipped=False, nonfinite=None)

    def update_frozen_model(self, name):
        pass


class Engine(LocalEngine):
    """Responses that subclasses spoil, streamed ones too."""

    def before(self, request):
        return request

    def after(self, completion):
        return completion

    async def generate(self, requests):
        return [self.after(completion) for completion in await super().generate([self.before(r) for r in requests])]

    async def stream(self, requests):
        async for completion in super().stream([self.before(request) for request in requests]):
            yield self.after(completion)


class ShiftedLogProbs(Engine):
    """Each token gets the log-prob of the one before."""

    def after(self, completion):
        return replace(completion, log_probs=np.roll(completion.log_probs, 1))


class CarelessSampling(Engine):
    """Greedy is lukewarm, seeds count up to a thousand, stop strings and structural tags are not looked at, the stop token is
    taken off, a streamed response is lost, and a top-p gives its whole batch other draws."""

    async def generate(self, requests):
        if any(request.sampling.top_p < 1 for request in requests):
            requests = [replace(request, seed=request.seed + 1) for request in requests]
        return await super().generate(requests)

    def before(self, request):
        sampling = replace(request.sampling, stop=(), structural_tag=None)
        if sampling.temperature == 0:
            sampling = replace(sampling, temperature=1.0)
        return replace(request, sampling=sampling, seed=request.seed % 1000)

    def after(self, completion):
        if completion.finish_reason is not FinishReason.STOP:
            return completion
        spans = tuple(span._replace(end=min(span.end, len(completion.token_ids) - 1)) for span in completion.spans)
        return replace(
            completion, token_ids=completion.token_ids[:-1], log_probs=completion.log_probs[:-1], spans=spans
        )

    async def stream(self, requests):
        completions = [completion async for completion in super().stream(requests)]
        for completion in completions[1:]:
            yield completion


class CarelessControl(Engine):
    """Does not pause, believes every bucket, forgets its weights while it sleeps, feels well when it is dead."""

    async def pause(self):
        pass

    async def load_bucket(self, bucket):
        await super().load_bucket(replace(bucket, checksum=xxhash.xxh3_64_hexdigest(bucket.data.tobytes())))

    async def wake_up(self):
        await super().wake_up()
        with torch.no_grad():
            for parameter in self._model.network.parameters():
                parameter.add_(0.1)

    async def health(self):
        pass


class CarelessVersions(Engine):
    """Returns no spans, reports no version but the first and no checksum but one, and returns an abort as a full budget."""

    def after(self, completion):
        if completion.finish_reason is FinishReason.ABORT:
            return replace(completion, finish_reason=FinishReason.LENGTH)
        return replace(completion, spans=())

    async def version(self):
        return -1

    async def checksum(self):
        return 16 * "0"


class Blocks(Engine):
    """Decodes to the end in one go."""

    async def generate(self, requests):
        completions = asyncio.ensure_future(super().generate(requests))
        await asyncio.sleep(0)
        while self._decoder.busy and not (self._paused or self._absent or self._loader.incomplete):
            self._decoder.step()
        self._consider()
        return await completions
