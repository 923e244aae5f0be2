"""VerlFunctionReward: calls a reward function of verl for each response."""

from __future__ import annotations

import asyncio
import importlib
import weakref
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Final

from slime_compat.config import VerlRewardConfig
from slime_compat.old_function import OldFunction
from slime_compat.reward import finished
from slime_compat.verl.function_file import function_in
from slime_core.contracts.reward import Reward, RewardValue
from slime_core.errors import PluginError, RewardError
from slime_core.types.sample import SampleGroup

OWN_FUNCTIONS: Final = "verl.utils.reward_score"
OWN: Final = "verl"
"""The path of verl's own functions."""
SCORE: Final = "score"


class VerlFunctionReward(Reward):
    """The columns data_source, reward_model and extra_info of verl's rows are in the metadata of prompts."""

    def __init__(self, config: VerlRewardConfig) -> None:
        """PluginError if there is no such function."""
        self._kwargs = config.reward_kwargs
        if Path(config.path).name == OWN:
            self._function = own_function()
        else:
            self._function = function_in(Path(config.path), config.function, where="reward")
        self._loop = asyncio.new_event_loop()
        weakref.finalize(self, self._loop.close)

    def score(self, group: SampleGroup) -> Sequence[RewardValue]:
        row = group.prompt.metadata
        of_row = row.get("reward_model")
        if not isinstance(of_row, Mapping) or "ground_truth" not in of_row:
            raise RewardError(
                f"reward 'verl': {group.prompt.origin or 'the prompt'} has no reward_model.ground_truth in its metadata, which "
                f'has: {", ".join(row) or "nothing"}. Set data.metadata_key = "*", which passes all columns on.'
            )
        arguments = {
            "data_source": row.get("data_source"),
            "ground_truth": of_row["ground_truth"],
            "extra_info": row.get("extra_info") or {},
        }
        return self._loop.run_until_complete(self._values([sample.response for sample in group.samples], arguments))

    async def _values(self, responses: Sequence[str], arguments: Mapping[str, Any]) -> list[RewardValue]:
        calls = [finished(self._function(solution_str=text, **arguments, **self._kwargs)) for text in responses]
        return [number_of(value) for value in await asyncio.gather(*calls)]


def own_function() -> OldFunction:
    try:
        function: OldFunction = importlib.import_module(OWN_FUNCTIONS).default_compute_score
    except ModuleNotFoundError as error:
        raise PluginError(
            f"reward 'verl': {OWN_FUNCTIONS} cannot be imported: {error}. Install verl, set reward.path to a file with a "
            "function of your own, or choose another reward (slime plugins)."
        ) from error
    return function


def number_of(value: Any) -> RewardValue:
    """The score, and the other numbers of a dict, which the run logs."""
    if isinstance(value, Mapping):
        if SCORE not in value:
            raise RewardError(f'the reward function returned {dict(value)!r}; a dict must have "{SCORE}".')
        return {str(key): float(number) for key, number in value.items() if isinstance(number, Real)}
    if not isinstance(value, Real):
        raise RewardError(f"the reward function returned {value!r}; it must return a number, or a dict.")
    return {SCORE: float(value)}
