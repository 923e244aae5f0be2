"""OldReward: calls an old reward function, of one sample, of a group, or of prompt and response."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from slime_compat.config import CompatRewardConfig
from slime_compat.old_args import OldArgs
from slime_compat.old_function import finished, parameters, resolve, takes, takes_keyword, wrong_form
from slime_compat.old_sample import Sample, old_sample
from slime_compat.requests import limited
from slime_core.contracts.reward import Reward, RewardValue
from slime_core.errors import RewardError
from slime_core.types.sample import SampleGroup


class OldReward(Reward):
    """Coroutines of one group run concurrently in one event loop, which stays open between groups: old modules keep
    connections open."""

    def __init__(self, config: CompatRewardConfig) -> None:
        """PluginError if the function is missing, or has another signature."""
        self._path = config.path
        self._group = config.group
        self._request_timeout = config.request_timeout
        self._args = OldArgs(config.args, "reward.args")
        self._function = resolve(config.path, config.python_path, where="reward.path")
        self._by_text = not config.group and parameters(self._function)[:2] == ["prompt", "response"]
        if not takes(self._function, 2):
            forms = (
                "(args, samples), with reward.group" if config.group else "(args, sample) or (prompt, response, label)"
            )
            raise wrong_form(config.path, self._function, "reward.path", forms)
        self._loop = asyncio.new_event_loop()
        weakref.finalize(self, self._loop.close)

    def score(self, group: SampleGroup) -> Sequence[RewardValue]:
        samples = [old_sample(sample) for sample in group.samples]
        with limited(self._request_timeout, "reward.request_timeout"):
            values = self._loop.run_until_complete(self._values(samples, [sample.response for sample in group.samples]))
        return [self._value(value) for value in values]

    async def _values(self, samples: list[Sample], responses: list[str]) -> Sequence[Any]:
        """responses: without special tokens, for functions of text; old samples have them, as upstream."""
        if not self._group:
            return await asyncio.gather(*map(self._one, samples, responses))
        values = await finished(self._function(self._args, samples))
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise RewardError(
                f"{self._path} returned {values!r}; with reward.group it must return a list, a value for each sample."
            )
        return values

    async def _one(self, sample: Sample, response: str) -> Any:
        if not self._by_text:
            return await finished(self._function(self._args, sample))
        label = {"label": sample.label} if takes_keyword(self._function, "label") else {}
        return await finished(self._function(sample.prompt, response, **label))

    def _value(self, value: Any) -> RewardValue:
        """The numbers of a dict, which the run logs; other values are dropped."""
        if isinstance(value, Mapping):
            numbers = {str(key): float(number) for key, number in value.items() if isinstance(number, Real)}
            if not numbers:
                raise RewardError(f"{self._path} returned {dict(value)!r}, which has no number.")
            return numbers
        if value is None:
            raise RewardError(f"{self._path} returned None; it must return a number, or a dict of numbers.")
        return value  # type: ignore[no-any-return]
