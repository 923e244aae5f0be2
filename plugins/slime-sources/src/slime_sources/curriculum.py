"""Curriculum by observed pass rates: a level with pass rate p is drawn in proportion to p (1 - p), which is largest if half of
the responses pass (ProCuRL, Tzannetos et al., arXiv:2304.12877, without its prior over contexts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import xxhash

from slime_core.contracts.renderer import Renderer
from slime_core.contracts.source import DataSource
from slime_core.errors import CheckpointError, DataError
from slime_core.types.prompt import Prompt
from slime_core.types.sample import SampleGroup
from slime_sources.config import CurriculumConfig, FilesConfig
from slime_sources.files import FilesSource

LEVEL_KEY: Final = "curriculum_level"
"""Key in the metadata of prompts with the name of their level."""
UNSEEN: Final = 0.5
"""Assumed pass rate of a level without observations, so that it is drawn soon."""


@dataclass(slots=True)
class Rate:
    """Pass rate of one level."""

    passed: float = UNSEEN
    num_groups: int = 0


class CurriculumSource(DataSource):
    """The level of a draw depends on the seed, the number of the draw, and the rates observed before it. In a synchronous run
    these are the same every time; if rollouts run ahead, they depend on when groups end."""

    def __init__(self, config: CurriculumConfig, renderer: Renderer, *, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._names = config.names
        self._levels = [
            FilesSource(
                FilesConfig.model_validate({"prompt_data": [level.path], "rollout_shuffle": config.rollout_shuffle}),
                renderer,
                seed=seed + number,
            )
            for number, level in enumerate(config.levels)
        ]
        if empty := [name for name, level in zip(self._names, self._levels, strict=True) if level.num_rows == 0]:
            raise DataError(f"data.levels = {', '.join(empty)}: no usable row")
        self._rates = {name: Rate() for name in self._names}
        self._num_draws = 0

    def take(self, num_prompts: int) -> list[Prompt]:
        return [self._draw() for _ in range(num_prompts)]

    def _draw(self) -> Prompt:
        upper = np.cumsum(list(self.shares().values()))
        word = int(np.random.PCG64([self._seed % 2**64, self._num_draws]).random_raw(1)[0])
        level = min(int(np.searchsorted(upper, (word >> 11) * 2.0**-53, side="right")), len(upper) - 1)
        (prompt,) = self._levels[level].take(1)
        metadata = {**prompt.metadata, LEVEL_KEY: self._names[level]}
        prompt = replace(prompt, group_index=self._num_draws, metadata=metadata)
        self._num_draws += 1
        return prompt

    def shares(self) -> dict[str, float]:
        """Level -> its share of the draws."""
        weights = {
            name: max(4 * rate.passed * (1 - rate.passed), self._config.least_share)
            for name, rate in self._rates.items()
        }
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items()}

    def observe(self, groups: Sequence[SampleGroup]) -> None:
        for group in groups:
            rate = self._rates.get(group.prompt.metadata.get(LEVEL_KEY, ""))
            rewards = group.rewards
            if rate is None or not rewards:
                continue
            passed = sum(reward >= self._config.pass_reward for reward in rewards) / len(rewards)
            rate.num_groups += 1
            # A plain mean at first, which removes the assumed rate.
            rate.passed += (passed - rate.passed) / min(rate.num_groups, self._config.memory)

    def state(self) -> Mapping[str, Any]:
        return {
            "fingerprint": self.fingerprint(),
            "num_draws": self._num_draws,
            "levels": [level.state() for level in self._levels],
            "rates": {name: [rate.passed, rate.num_groups] for name, rate in self._rates.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        if state.get("fingerprint") != self.fingerprint():
            raise CheckpointError(
                "the checkpoint was saved with other levels (data.levels) or other options. Set them back, or start a new run."
            )
        for level, of_level in zip(self._levels, state["levels"], strict=True):
            level.restore(of_level)
        self._num_draws = state["num_draws"]
        self._rates = {name: Rate(passed, count) for name, (passed, count) in state["rates"].items()}

    @property
    def num_rows(self) -> int | None:
        return None

    def fingerprint(self) -> str:
        parts = [f"{name} {level.fingerprint()}" for name, level in zip(self._names, self._levels, strict=True)]
        options = f"{self._config.pass_reward} {self._config.memory} {self._config.least_share}"
        return xxhash.xxh3_128_hexdigest("\n".join([*parts, options]).encode())

    @property
    def metrics(self) -> Mapping[str, float]:
        rates = {f"rollout/curriculum/{name}/pass_rate": rate.passed for name, rate in self._rates.items()}
        return rates | {f"rollout/curriculum/{name}/share": share for name, share in self.shares().items()}
