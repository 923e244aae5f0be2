"""single_turn: one engine call per response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slime_core.contracts.generator import Episode, Generator
from slime_core.types.sample import Sample, Status


class SingleTurn(Generator):
    """Continues the prompt, or the tokens that a partial rollout kept, until the model stops or the token limit."""

    async def generate(self, episode: Episode) -> Sequence[Sample]:
        trajectory = episode.trajectory()
        sampling = episode.sampling
        if trajectory.response_length:
            sampling = replace(sampling, max_new_tokens=sampling.max_new_tokens - trajectory.response_length)
        if sampling.max_new_tokens <= 0:
            return [trajectory.finish(status=Status.TRUNCATED)]
        completion = await episode.complete(trajectory.tokens, sampling)
        trajectory.append_completion(completion)
        return [trajectory.finish()]
