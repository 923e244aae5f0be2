"""TrlFunctionReward: calls a reward function of TRL's GRPOTrainer for the samples of a group."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import Sequence
from numbers import Real
from typing import Any, Final

from slime_compat.config import TrlRewardConfig
from slime_compat.old_function import resolve
from slime_compat.reward import finished
from slime_core.contracts.reward import Reward, RewardValue
from slime_core.errors import PluginError, RewardError
from slime_core.types.sample import SampleGroup

OF_TRAINER: Final = ("trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that only TRL's trainer has."""
OWN: Final = ("prompts", "completions", "completion_ids")


class TrlFunctionReward(Reward):
    """The columns of the data set are in the metadata of prompts. TRL passes a batch, this the samples of one prompt."""

    def __init__(self, config: TrlRewardConfig) -> None:
        """PluginError if the function is missing, or needs what only TRL's trainer has."""
        self._path = config.path
        self._function = resolve(config.path, config.python_path, where="reward.path")
        parameters = inspect.signature(self._function).parameters
        asked = [
            name for name in OF_TRAINER if name in parameters and parameters[name].default is inspect.Parameter.empty
        ]
        if asked:
            raise PluginError(
                f'reward.path = "{config.path}": it requires {", ".join(asked)}, which rewards here do not have. Give '
                f"{'it' if len(asked) == 1 else 'them'} a default value."
            )
        self._loop = asyncio.new_event_loop()
        weakref.finalize(self, self._loop.close)

    def score(self, group: SampleGroup) -> Sequence[RewardValue]:
        prompt, count = group.prompt, len(group.samples)
        texts = [sample.response for sample in group.samples]
        chat = prompt.messages is not None
        arguments: dict[str, Any] = {
            # Functions may change what they get.
            "prompts": [
                [dict(m) for m in prompt.messages] if prompt.messages is not None else prompt.text for _ in texts
            ],
            "completions": [[{"role": "assistant", "content": text}] if chat else text for text in texts],
            "completion_ids": [sample.response_tokens.tolist() for sample in group.samples],
        }
        arguments |= {str(key): [value] * count for key, value in prompt.metadata.items() if key not in OWN}
        values = self._loop.run_until_complete(finished(self._function(**arguments)))
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != count:
            raise RewardError(f"{self._path} returned {values!r}; it must return a list of {count} numbers.")
        return [self._number(value) for value in values]

    def _number(self, value: Any) -> float:
        """None counts as 0, as in TRL's sum."""
        if value is not None and not isinstance(value, Real):
            raise RewardError(f"{self._path} returned {value!r} for a completion; it must be a number or None.")
        return 0.0 if value is None else float(value)
