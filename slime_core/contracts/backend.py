"""TrainBackend: one rank's view of a trainable model.

Calling order: `setup`, then any of `load`, `score`, `train_step`, `export_tensors`, `save`, `sleep`, `wake`, then
`close`; between `sleep` and `wake` only `close`, and with the weights alone what `sleep` says. All ranks of a role make
the same calls in the same order with equally many micro-batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from slime_core.contracts.driver import Driver
from slime_core.contracts.needs import Need
from slime_core.contracts.setup import TrainerSetup

if TYPE_CHECKING:
    from torch import Tensor

    from slime_core.contracts.loss import Segments
    from slime_core.contracts.optimizer import OptimizerDriver
    from slime_core.contracts.setup import RoutingReplay
    from slime_core.types.batch import Float32, Int64
    from slime_core.types.microbatch import MicroBatch
    from slime_core.types.report import StepReport

ACTOR = "actor"
"""Name of the trained weights in `score(weights=...)`, whichever role they are of."""
REFERENCE = "reference"
TEACHER = "teacher"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where a rank stands. Ranks of one `dp_rank` work on the same samples."""

    dp_rank: int = 0
    dp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    reports: bool = True
    """One of the ranks that hold the same tokens reports their metric sums and scores; the others do not."""
    micro_batch_multiple: int = 1
    """The count of micro-batches per rank must divide by it (virtual pipeline stages)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """float32 (T',) for one micro-batch, T' = the response tokens this rank holds."""

    log_probs: Float32 | None = None
    entropy: Float32 | None = None
    values: Float32 | None = None
    rows: Int64 | None = None
    """(T',) which of the micro-batch's T response tokens; None: all of them, in order."""

    def present(self) -> Mapping[str, Float32]:
        columns = {"log_probs": self.log_probs, "entropy": self.entropy, "values": self.values}
        return {name: column for name, column in columns.items() if column is not None}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectiveOutput:
    """`loss` is this micro-batch's share of the step's loss: shares add up over micro-batches and ranks, with no
    averaging. `sums` are detached scalars that add up to metrics in the same way."""

    loss: Tensor
    sums: Mapping[str, Tensor]


class Objective(Protocol):
    """The kernel's loss over one micro-batch, built from the recipe. A backend calls it, and knows no algorithm."""

    @property
    def reads_values(self) -> bool:
        """True for a critic: give `values`; else give `log_probs`."""

    @property
    def wants_entropy(self) -> bool: ...

    @property
    def entropy_has_gradient(self) -> bool:
        """False: compute entropy without keeping activations."""

    def __call__(
        self,
        micro: MicroBatch,
        *,
        segments: Segments,
        log_probs: Tensor | None = None,
        entropy: Tensor | None = None,
        values: Tensor | None = None,
    ) -> ObjectiveOutput:
        """Tensors are (T',) float32, on the device of `micro`'s columns. T' = 0 gives a zero with a graph."""


class TrainBackend(ABC):
    """See the module's calling order."""

    @abstractmethod
    def setup(self, setup: TrainerSetup) -> Layout:
        """Joins the process group, loads the model and its copies, builds optimiser and schedule."""

    @abstractmethod
    def score(self, micros: Sequence[MicroBatch], *, weights: str = ACTOR, entropy: bool = False) -> list[Scores]:
        """Forward without gradient, under the trained weights or one of the copies. Micro-batches are on the CPU."""

    @abstractmethod
    def train_step(self, micros: Sequence[MicroBatch], objective: Objective) -> StepReport:
        """Forward and backward of every micro-batch, gradients summed over them and over all ranks (undoing any
        averaging), clip, one optimiser step, one step of the schedule. Non-finite loss or norm: nothing is changed and
        the report says `skipped`."""

    @abstractmethod
    def export_tensors(self, *, everywhere: bool = False) -> Iterator[Mapping[str, Tensor] | None]:
        """Whole tensors under their Hugging Face names, on this rank's device, some at a time (a layer, say), always in the
        same order. Every rank must exhaust the iterator, since gathering is collective; ranks other than 0 yield None
        unless `everywhere`. A tensor may be a view of what is trained: it is read before the next step and before
        `sleep`, never written."""

    def frozen_tensors(self) -> frozenset[str]:
        """Names that `export_tensors` gives with the same content every time: an engine needs them once."""
        return frozenset()

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Weights, optimiser, schedule and this rank's random state, into an existing folder that all ranks share."""

    def stage(self, folder: Path) -> Callable[[], None]:
        """`save` in two parts, where `BackendDriver.stages` says so: what is saved is copied to the host now, and what is
        returned writes it, with the same content as `save`. It is called in a thread of its own while this rank goes on with
        other calls, so its collectives have a process group of their own. The next `stage` or `save` waits for it."""
        raise NotImplementedError

    @abstractmethod
    def load(self, folder: Path) -> None:
        """What `save` wrote. Raises CheckpointError if it is incomplete or of another shape."""

    @abstractmethod
    def save_hf(self, folder: Path) -> None:
        """safetensors and config that `transformers` loads, into a folder that all ranks share; the tokenizer is the kernel's
        business. It has no config.json before it is whole."""

    @abstractmethod
    def refresh_copy(self, name: str) -> None:
        """Copies the trained weights over the frozen copy `name`."""

    @abstractmethod
    def sleep(self, keep_weights: bool = False) -> None:
        """Gives the device memory back: weights, gradients, optimiser go to the host. With `keep_weights` all but what
        `export_tensors` reads; then only `export_tensors`, `sleep` and `wake` may follow."""

    @abstractmethod
    def wake(self, weights_only: bool = False) -> None:
        """Takes back what it gave; with `weights_only` what `export_tensors` reads, as after `sleep(keep_weights=True)`."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the process group."""


class BackendDriver(Driver[TrainBackend]):
    provides: ClassVar[frozenset[Need]] = frozenset(
        {Need.OLD_LOGPROBS, Need.REF_LOGPROBS, Need.ENTROPY, Need.TEACHER_LOGPROBS}
    )
    takes_images: ClassVar[bool] = False
    """It reads `MicroBatch.images`; a run with images is refused where it does not."""
    stages: ClassVar[bool] = False
    """Checkpoints can be written while training goes on (`TrainBackend.stage`)."""
    replays: ClassVar[frozenset[RoutingReplay]] = frozenset()
    """Whose choices of experts it can go by."""
    layout_options: ClassVar[frozenset[str]] = frozenset()
    """Options that say which rank holds what, and not what is trained: `load` takes a checkpoint that was saved under
    others, and `--resume FOLDER` goes on with it. Also those whose default depends on the device, so that a run that moves can
    say what it had: `load` refuses another."""

    @classmethod
    def least_ranks(cls, config: Any) -> int:
        """How many ranks the layout needs at least."""
        return 1

    @classmethod
    @abstractmethod
    def layout(cls, config: Any, rank: int, world_size: int) -> Layout:
        """Pure; the config has passed `problems`."""

    @classmethod
    def true_on_policy_problems(cls, config: Any) -> list[str]:
        """What keeps a trainer with these options from `TrainerSetup.true_on_policy`; empty if it can."""
        return ["this backend computes with kernels of its own"]

    @classmethod
    def optimizer_problems(cls, config: Any, name: str, optimizer: type[OptimizerDriver]) -> list[str]:
        """What keeps a trainer with these options from stepping with this optimizer; empty if it can."""
        return []

    @classmethod
    def problems(cls, config: Any, world_size: int, model_config: Mapping[str, Any]) -> list[str]:
        """Everything that does not fit between options, ranks and the model's config.json; empty if all does."""
        return []
