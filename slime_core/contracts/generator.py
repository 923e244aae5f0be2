"""Generator: turns a prompt into one or more samples, in one turn or many."""

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
    """One response to generate: the kernel passes it to a generator."""

    @property
    def prompt(self) -> Prompt:
        """The prompt to respond to."""

    @property
    def sampling(self) -> SamplingParams:
        """Options of the run or of the evaluation set; `max_new_tokens` limits the whole response, over all turns."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of the policy's model."""

    @property
    def evaluation(self) -> bool:
        """True for a response of an evaluation set, which is never trained on."""

    @property
    def max_context_len(self) -> int | None:
        """Limit of prompt and response together in tokens, tool output included; None: only the model's own limit."""

    @property
    def versions(self) -> range:
        """Policy versions whose tokens may be trained on now; the last one is the current version."""

    @property
    def kept(self) -> Sample | None:
        """Part of this response that a partial rollout kept; None: it starts from the prompt."""

    def trajectory(self, prompt: Prompt | None = None) -> Trajectory:
        """Returns a trajectory that starts with the prompt and, for a partial rollout, the kept tokens. prompt: another prompt,
        for an agent that sees another context; the trajectory then has no response tokens."""

    async def stopped(self) -> None:
        """Waits until the response must end as it is. From then on `complete` returns empty, aborted completions."""

    async def score(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Returns the samples with rewards of the run's reward, for a generator that shares or uses them. The kernel keeps
        rewards that a sample has already. A reward that compares responses sees only these samples. Raises RewardError
        if the run has no reward, or if a failed reward must end it."""

    async def complete(self, token_ids: npt.NDArray[np.int32], sampling: SamplingParams | None = None) -> Completion:
        """Sends one request to an engine. token_ids: int32 (T,), the tokens to continue: `Trajectory.tokens`, never
        re-tokenized text; sampling: None: `self.sampling`. `max_new_tokens` is reduced to the room in the context."""


class Generator(ABC):
    """Stateless between episodes. Many episodes run concurrently in one event loop, so nothing may block. A run builds one
    generator per set of options; training and evaluation sets with equal options share it."""

    async def open(self) -> None:
        """Called once, while trainers and engines start. Raises PluginError with a fix if a dependency is missing."""
        return

    @abstractmethod
    async def generate(self, episode: Episode) -> Sequence[Sample]:
        """Returns at least one sample. Samples of one episode share its rollout id unless the generator sets others."""

    async def close(self) -> None:
        """Called at the end of the run: closes connections and ends processes."""


class GeneratorDriver(Driver[Generator]):
    """Chosen by --generate."""

    gives_rewards: ClassVar[bool] = False
    """True: all its samples have rewards, so the run needs no reward of its own."""
    per_worker: ClassVar[bool] = True
    """False: a run has one generator, which listens on a port, for example; rollout workers would have one each."""
