"""Generator: answers one prompt with one or more samples, in one turn or many."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from slime_core.contracts.driver import Driver

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerBase

    from slime_core.types.completion import Completion, SamplingParams
    from slime_core.types.prompt import Prompt
    from slime_core.types.sample import Sample
    from slime_core.types.trajectory import Trajectory


class Episode(Protocol):
    """One answer to be produced: what the kernel hands to a generator."""

    @property
    def prompt(self) -> Prompt: ...

    @property
    def sampling(self) -> SamplingParams:
        """As configured for the run or the evaluation set; `max_new_tokens` is the budget of the whole response."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    @property
    def evaluation(self) -> bool: ...

    @property
    def max_context_len(self) -> int | None:
        """Tokens of prompt and response together, what tools write included; None: the model's own limit alone."""

    @property
    def versions(self) -> range:
        """Policy versions whose tokens may be trained now, the policy's own last."""

    @property
    def kept(self) -> Sample | None:
        """What a partial rollout left of this answer."""

    def trajectory(self, prompt: Prompt | None = None) -> Trajectory:
        """An empty trajectory that starts with the prompt, or, for a partial rollout, with what was kept of it. With a
        prompt of its own (an agent that sees something else) it is always empty."""

    async def stopped(self) -> None:
        """Returns once the answer is to end as it is. From then on every completion is an empty one that says aborted."""

    async def score(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """With rewards, by the run's reward, for a generator whose samples are to share one, or that goes on by it. A
        reward that a sample has is kept as it is later on. What compares the answers of a group sees these alone.
        RewardError if the run has no reward, or where a failure is to end it."""

    async def complete(self, token_ids: npt.NDArray[np.int32], sampling: SamplingParams | None = None) -> Completion:
        """One engine call. Token in, token out: continue from `Trajectory.tokens`, never from re-tokenised text."""


class Generator(ABC):
    """Stateless between episodes; many episodes run at once in one event loop, so nothing may block. A run builds one for
    each set of options; training and evaluation sets with equal ones share it."""

    async def open(self) -> None:
        """Once, while trainers and engines start: PluginError, with what to type, if what it depends on is not there."""
        return

    @abstractmethod
    async def generate(self, episode: Episode) -> Sequence[Sample]:
        """At least one sample. Samples of one episode share its rollout id unless the generator says otherwise."""

    async def close(self) -> None:
        """At the end of the run: what it has opened by then (connections, processes) is let go."""


class GeneratorDriver(Driver[Generator]):
    """Chosen by --generate."""

    gives_rewards: ClassVar[bool] = False
    """Its samples have their rewards, or it raises: a run needs none of its own."""
