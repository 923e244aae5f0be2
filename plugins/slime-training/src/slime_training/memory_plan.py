"""Memory: what a backend, an engine or a transport will hold, estimated before anything is started (`slime plan`).

A plugin counts its bytes from its options, the model's config.json and the number of ranks, and returns them as lines. The
command adds them up by phase and compares them with a device. Plugins that return None are listed as not estimated. There may
be no GPU at that time: put nothing on a device, start nothing, read no weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from slime_core.contracts.setup import EngineSetup, TrainerSetup


class MemoryPhase(StrEnum):
    """Phase in which memory is held: first those of a trainer that is awake, then those of an engine."""

    IDLE = "idle"
    """Between the trainer's calls: what it always holds unless it sleeps."""
    SCORE = "score"
    """A forward without gradient."""
    LOSS = "loss"
    """Between forward and backward, with the head's logits."""
    BACKWARD = "backward"
    """In the backward of the last layer, when nearly all activations are still held."""
    REDUCE = "reduce"
    """At the end of the backward, when all gradients exist."""
    STEP = "step"
    """During the optimizer's step."""
    SYNC = "sync"
    """While weights are sent to the engines; a phase of trainers and of engines."""
    ROLLOUT = "rollout"
    """An engine generates."""
    ASLEEP = "asleep"
    """An engine on the trainer's devices while the trainer works."""


TRAINING = (MemoryPhase.SCORE, MemoryPhase.LOSS, MemoryPhase.BACKWARD, MemoryPhase.REDUCE, MemoryPhase.STEP)
"""Phases of a training step."""
AWAKE = frozenset({MemoryPhase.IDLE, *TRAINING, MemoryPhase.SYNC})
"""All phases of a trainer that is awake."""
STATE = AWAKE - {MemoryPhase.SYNC}
"""Phases in which a trainer holds what `export_weights` does not read, such as the state of its optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryItem:
    """Highest number of bytes of one component, on one device or, for one rank, on its host."""

    component: str
    """Name in a table: weights, gradients, first moment, activations, keys and values."""
    num_bytes: int
    moments: frozenset[MemoryPhase]
    """Phases in which it is held."""
    place: Literal["device", "host"] = "device"
    estimate: bool = False
    """True: an estimate, not counted tensor by tensor."""
    moves: bool = True
    """For a trainer. True: it moves to the host when the trainer sleeps, where its memory is reserved; false: it is freed."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLoad:
    """Largest inputs of a trainer's rank."""

    setup: TrainerSetup
    """Setup of rank 0. Its device is the planned one, which may not exist here. The folders may be without weights."""
    tokens: int
    """Tokens that this rank computes in the largest micro-batch of training."""
    scored_tokens: int
    """Tokens in the largest micro-batch of a forward without gradient."""
    num_micro_batches: int
    """Highest number of micro-batches of an optimizer step on one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Inputs of an engine's estimate."""

    setup: EngineSetup
    device_bytes: int | None
    """Memory of one of its devices; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """What a backend returns: lines of one rank."""

    lines: tuple[MemoryItem, ...]
    not_estimated: tuple[str, ...] = ()
    """What the backend holds besides and cannot estimate, and why. If there is any, it is not known whether the run fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """What an engine returns: lines of one of its devices, and the capacity of its KV cache."""

    lines: tuple[MemoryItem, ...]
    kv_tokens: int | None = None
    """Tokens whose keys and values all devices of the engine hold together; None: not known before it starts."""
    notes: tuple[str, ...] = ()
    not_estimated: tuple[str, ...] = ()
    """What the engine cannot estimate, and which option would fix its size. If there is any, it is not known whether the run
    fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportMemory:
    """What a weight update holds beside the weights."""

    trainer: tuple[MemoryItem, ...] = ()
    """On the rank of the policy that sends the most."""
    engine: tuple[MemoryItem, ...] = ()
    """On each device of an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedTensor:
    """A trained parameter, as the optimizer holds it on the rank with most of it."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    num_elements: int
    """On this rank, which holds whole rows."""
    hidden: bool
    """A matrix of a layer (`OptimizerFactory`)."""


class OptimizerPlanner:
    """A base beside `OptimizerDriver`, for optimizers whose state is not one float32 tensor of the parameter's size for each of
    `moments`."""

    @classmethod
    def memory(
        cls, config: Any, tensors: Sequence[SteppedTensor], num_ranks: int, place: Literal["device", "host"]
    ) -> tuple[MemoryItem, ...]:
        """Returns what it holds on a rank, of `num_ranks` that share each tensor. `place`: where parameters and state lie."""
        raise NotImplementedError


class TrainerPlanner:
    """A base beside `BackendDriver`, for backends that estimate what their ranks will hold."""

    @classmethod
    def memory(cls, config: Any, load: TrainerLoad) -> TrainerMemory:
        """Returns what the rank with the highest use will hold. Starts nothing, and requires no GPU, weights or process group:
        sizes come from config.json, or from a model on the meta device. Raises ModelError for a model that it could not
        train."""
        raise NotImplementedError

    @classmethod
    def memory_savers(cls, config: Any, load: TrainerLoad) -> Sequence[Mapping[str, Any]]:
        """Options that may lower the use; those of one entry belong together. `slime plan` calls `memory` again with each, and
        lists those that pass `problems` and do lower it."""
        return ()


class EnginePlanner:
    """A base beside `EngineDriver`, for engines that estimate their memory."""

    @classmethod
    def memory(cls, config: Any, load: EngineLoad) -> EngineMemory | None:
        """Returns what the engine will hold on each of its devices; None: not known. Starts nothing, and requires no GPU or
        weights."""
        raise NotImplementedError


class TransportPlanner:
    """A base beside `TransportDriver`, for transports that estimate their memory."""

    @classmethod
    def memory(cls, config: Any, num_bytes: int) -> TransportMemory | None:
        """Returns what sending `num_bytes` of weights holds; None: not known."""
        raise NotImplementedError


def bytes_at(lines: Iterable[MemoryItem], moment: MemoryPhase, place: Literal["device", "host"] = "device") -> int:
    return sum(line.num_bytes for line in lines if line.place == place and moment in line.moments)


def peak_of(lines: Iterable[MemoryItem], place: Literal["device", "host"] = "device") -> tuple[MemoryPhase, int]:
    """Returns the phase with the highest use, the first of equals, and its bytes."""
    items = list(lines)
    return max(((moment, bytes_at(items, moment, place)) for moment in MemoryPhase), key=lambda found: found[1])
