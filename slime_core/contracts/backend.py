"""TrainBackend: one rank's view of a trainable model.

Calling order: `setup`, then any of `load`, `forward_only`, `begin_rollout`, `train_step`, `export_weights`, `save`, `sleep`,
`wake_up`, then `close`. Between `sleep` and `wake_up` only `close` may be called, and after `sleep(keep_weights=True)` also
`export_weights`. `train_step` is `forward_backward`, once or more, and `optim_step`; between them only `forward_only`.
All ranks of a role make the same calls in the same order with the same number of micro-batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from slime_core.contracts.driver import Driver
from slime_core.contracts.needs import Need
from slime_core.contracts.optimizer import OptimizerDriver, StepSettings
from slime_core.contracts.setup import TrainerSetup
from slime_core.errors import TrainingError

if TYPE_CHECKING:
    from torch import Tensor

    from slime_core.contracts.loss import Segments
    from slime_core.contracts.setup import RoutingReplay
    from slime_core.types.batch import Float32, Int64
    from slime_core.types.microbatch import MicroBatch
    from slime_core.types.report import StepReport

ACTOR = "actor"
"""Name of the trained weights in `forward_only(weights=...)`, for every role."""
REFERENCE = "reference"
TEACHER = "teacher"


class OutOfDeviceMemory(TrainingError):
    """A micro-batch does not fit into the memory of its device. Nothing has changed and no gradient is left, so that a rank
    which is alone may be called again with smaller micro-batches."""

    def __init__(self, number: int, message: str) -> None:
        """`number`: position of the micro-batch in the call. `message`: the allocator's."""
        self.number = number
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Position of a rank in the parallel layout. Ranks of one `dp_rank` process the same samples."""

    dp_rank: int = 0
    """Data-parallel rank, in [0, dp_size): which of dp_size parts of the samples it processes."""
    dp_size: int = 1
    cp_rank: int = 0
    """Context-parallel rank, in [0, cp_size): which of cp_size parts of each sequence it holds."""
    cp_size: int = 1
    reports: bool = True
    """Whether it reports metric sums and scores: True for exactly one of the ranks that hold the same tokens."""
    micro_batch_multiple: int = 1
    """The number of micro-batches per rank must be a multiple of it (virtual pipeline stages)."""
    shares_prompts: bool = False
    """The backend computes a prompt once for neighbouring samples of a micro-batch that continue it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """Forward results of one micro-batch: float32 (T',) each, T' = the response tokens that this rank holds."""

    log_probs: Float32 | None = None
    """Nats, of the response tokens at the micro-batch's temperature; None for a value head."""
    entropy: Float32 | None = None
    """Nats, of the whole distribution at each token; None unless it was requested."""
    values: Float32 | None = None
    """Outputs of a value head; None for a language-model head."""
    rows: Int64 | None = None
    """(T',) which of the micro-batch's T response tokens; None: all of them, in order."""

    def present(self) -> Mapping[str, Float32]:
        columns = {"log_probs": self.log_probs, "entropy": self.entropy, "values": self.values}
        return {name: column for name, column in columns.items() if column is not None}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectiveOutput:
    """`loss`: scalar, this micro-batch's part of the step's loss; parts are summed over micro-batches and ranks, not
    averaged. `sums`: detached scalars that are summed to metrics in the same way."""

    loss: Tensor
    sums: Mapping[str, Tensor]


class Objective(Protocol):
    """The kernel's loss over one micro-batch, built from the recipe. A backend calls it and has no code of any algorithm."""

    @property
    def reads_values(self) -> bool:
        """True for a critic: pass `values`; otherwise pass `log_probs`."""

    @property
    def needs_entropy(self) -> bool:
        """True: pass `entropy`, for the loss or for the metric."""

    @property
    def entropy_has_gradient(self) -> bool:
        """False: entropy is only a metric; compute it without gradient, keeping no activations."""

    def __call__(
        self,
        micro: MicroBatch,
        *,
        segments: Segments,
        log_probs: Tensor | None = None,
        entropy: Tensor | None = None,
        values: Tensor | None = None,
    ) -> ObjectiveOutput:
        """Computes the loss of `micro`. Tensors are (T',) float32 on the device of its columns; T' = 0 returns a zero with a
        graph. segments: reductions over the samples of `micro`. Pass `values` if `reads_values`, else `log_probs`."""


class TrainBackend(ABC):
    """See the module's calling order."""

    @abstractmethod
    def setup(self, setup: TrainerSetup) -> Layout:
        """Joins the process group, loads the model and its frozen copies, builds optimizer and schedule."""

    @abstractmethod
    def forward_only(
        self, micros: Sequence[MicroBatch], *, weights: str = ACTOR, entropy: bool = False
    ) -> list[Scores]:
        """Forward without gradient; returns one `Scores` per micro-batch, in order. micros: on the CPU. weights: ACTOR or the
        name of a frozen copy. entropy: fill `Scores.entropy` too. Raises OutOfDeviceMemory."""

    def begin_rollout(self, rollout_id: int) -> None:
        """Called before the optimizer steps of a rollout step. rollout_id: its number, from 0."""

    def train_step(self, micros: Sequence[MicroBatch], objective: Objective) -> StepReport:
        """One optimizer step on these micro-batches. Raises OutOfDeviceMemory."""
        self.forward_backward(micros, objective)
        return self.optim_step()

    @abstractmethod
    def forward_backward(self, micros: Sequence[MicroBatch], objective: Objective) -> None:
        """Forward and backward of every micro-batch; adds their gradients to those since the last `optim_step`, summed over
        all ranks (undoing any averaging). Raises OutOfDeviceMemory, and has dropped all these gradients then."""

    @abstractmethod
    def optim_step(self, settings: StepSettings = StepSettings()) -> StepReport:
        """Clips the gradients, then one optimizer step and one step of the schedule. If loss or norm is not finite, nothing
        changes and the report has `skipped` set. The report has the sums of all `forward_backward` since the last one. Raises
        TrainingError if there was none. settings: of this step alone, those in `BackendDriver.step_settings`."""

    @abstractmethod
    def export_weights(self, *, all_ranks: bool = False) -> Iterator[Mapping[str, Tensor] | None]:
        """Yields whole tensors by Hugging Face name, on this rank's device, a few at a time (such as one layer), always in
        the same order. Every rank must exhaust the iterator, since gathering is collective; ranks other than 0 yield None
        unless `all_ranks`. A tensor may be a view of a trained parameter: read it before the next step and before `sleep`,
        and never write to it."""

    def frozen_tensors(self) -> frozenset[str]:
        """Names of tensors that `export_weights` yields unchanged every time: an engine needs them once."""
        return frozenset()

    def export_adapter(self, *, all_ranks: bool = False) -> Iterator[Mapping[str, Tensor] | None]:
        """`export_weights` of the trained LoRA adapter alone, with the names of peft's adapter_model.safetensors. Only called
        if `BackendDriver.adapter_rank` is not 0."""
        raise NotImplementedError

    def adapter_config(self) -> Mapping[str, Any]:
        """Content of peft's adapter_config.json, for what `export_adapter` yields."""
        raise NotImplementedError

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes weights, optimizer, schedule and this rank's random state into an existing folder that all ranks share."""

    def stage(self, folder: Path) -> Callable[[], None]:
        """`save` in two parts, for backends with `BackendDriver.supports_async_save`: copies the state to the host now, and
        returns a function that writes it, with the same content as `save`. The function is called in a thread of its own while
        this rank serves other calls, so its collectives need a process group of their own. The next `stage` or `save` waits for
        it."""
        raise NotImplementedError

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Loads what `save` wrote into `folder`. Raises CheckpointError if it is incomplete or its shapes differ."""

    @abstractmethod
    def save_hf(self, folder: Path) -> None:
        """Writes safetensors and config for `transformers` into a folder that all ranks share; the kernel adds the tokenizer.
        config.json is written last, so a folder without it is incomplete."""

    @abstractmethod
    def update_frozen_model(self, name: str) -> None:
        """Copies the trained weights over the frozen copy `name`."""

    @abstractmethod
    def sleep(self, keep_weights: bool = False) -> None:
        """Offloads weights, gradients and optimizer to the host and frees the device memory. With `keep_weights`, all but
        the tensors that `export_weights` reads; then only `export_weights`, `sleep`, `wake_up` and `close` may follow."""

    @abstractmethod
    def wake_up(self, weights_only: bool = False) -> None:
        """Onloads everything again; with `weights_only` what `export_weights` reads, as after `sleep(keep_weights=True)`."""

    def free_cache(self) -> None:
        """Gives back memory that the device's allocator keeps without a use, for engines that share the device."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the process group."""


class BackendDriver(Driver[TrainBackend]):
    """Chosen by backend.name."""

    provides: ClassVar[frozenset[Need]] = frozenset(
        {Need.OLD_LOGPROBS, Need.REF_LOGPROBS, Need.ENTROPY, Need.TEACHER_LOGPROBS}
    )
    """Columns that it can compute; an algorithm that needs another one is a config error. A value head needs `Need.VALUES`."""
    supports_images: ClassVar[bool] = False
    """It reads `MicroBatch.images`; if False, a run with images is a config error."""
    supports_async_save: ClassVar[bool] = False
    """Checkpoints can be written while training continues (`TrainBackend.stage`)."""
    routing_replay_modes: ClassVar[frozenset[RoutingReplay]] = frozenset()
    """Modes of expert replay that it supports (`TrainerSetup.routing_replay`)."""
    step_settings: ClassVar[frozenset[str]] = frozenset({"lr"})
    """Fields of `StepSettings` that `optim_step` can take from a call."""
    layout_options: ClassVar[frozenset[str]] = frozenset()
    """Options of what each rank holds and when, not of the result: `--resume FOLDER` may change them, `load` reshards. Also
    those whose default depends on the device, so that a run that moves can set its earlier value; `load` refuses any other."""

    @classmethod
    def reads_frozen(cls, folder: Path) -> bool:
        """Whether it loads a frozen copy of the trained model from `folder`, which has another format than Hugging Face's."""
        return False

    @classmethod
    def min_world_size(cls, config: Any) -> int:
        """Smallest number of ranks that the layout of these options works with."""
        return 1

    @classmethod
    @abstractmethod
    def layout(cls, config: Any, rank: int, world_size: int) -> Layout:
        """Position of `rank` (0 to world_size - 1). Pure; `config` has passed `problems`."""

    @classmethod
    def true_on_policy_problems(cls, config: Any) -> list[str]:
        """Reasons why these options do not support `TrainerSetup.true_on_policy`; empty if they do."""
        return ["this backend computes with kernels of its own"]

    @classmethod
    def adapter_rank(cls, config: Any) -> int:
        """Largest rank of the LoRA adapter that these options train; 0: they train weights."""
        return 0

    @classmethod
    def optimizer_problems(cls, config: Any, name: str, optimizer: type[OptimizerDriver]) -> list[str]:
        """Reasons why these options do not support `optimizer`, which is registered as `name`; empty if they do."""
        return []

    @classmethod
    def problems(cls, config: Any, world_size: int, model_config: Mapping[str, Any]) -> list[str]:
        """Conflicts between options, number of ranks and model; empty if there are none. model_config: its config.json."""
        return []
