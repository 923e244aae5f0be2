"""Memory: what a backend, an engine or a transport will hold, told before anything is started (`slime plan`).

Whoever can count its bytes from its options, the model's config.json and the number of ranks tells them as lines; the kernel
adds them up by moment and compares them with a device. Who tells nothing is shown as not told. No GPU is there when this is
asked: nothing may be put on a device, nothing started, no weight read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from slime_core.contracts.setup import EngineSetup, TrainerSetup


class Moment(StrEnum):
    """When something is held. Those of a trainer that is awake, then those of an engine."""

    IDLE = "idle"
    """Between its calls: what it always holds, unless it sleeps."""
    SCORE = "score"
    """A forward without gradient."""
    LOSS = "loss"
    """Between forward and backward, with the head's logits."""
    BACKWARD = "backward"
    """In the backward of the last layer, when nearly all activations are still there."""
    REDUCE = "reduce"
    """At the end of the backward, when all gradients are there."""
    STEP = "step"
    """In the optimiser's step."""
    SYNC = "sync"
    """While weights are brought to the engines. Of trainers and engines."""
    ROLLOUT = "rollout"
    """An engine that generates."""
    ASLEEP = "asleep"
    """An engine on the trainer's devices while the trainer works."""


TRAINING = (Moment.SCORE, Moment.LOSS, Moment.BACKWARD, Moment.REDUCE, Moment.STEP)
"""Moments of a trainer's turn."""
AWAKE = frozenset({Moment.IDLE, *TRAINING, Moment.SYNC})
"""All of a trainer that is awake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """Bytes of one component, at most, on one device or, of one rank, on its host."""

    component: str
    """What a table calls it: weights, gradients, first moment, activations, keys and values."""
    num_bytes: int
    moments: frozenset[Moment]
    """When it is there."""
    place: Literal["device", "host"] = "device"
    estimate: bool = False
    """Not counted tensor by tensor."""
    moves: bool = True
    """Of a trainer: goes to the host when it sleeps, where its place is kept; off: it is given up then."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLoad:
    """What a trainer's rank will be given at most."""

    setup: TrainerSetup
    """Rank 0's. Its device is the one that is planned for, which need not be there. Weights need not be in the folders."""
    tokens: int
    """In the largest micro-batch that is trained on: those that this rank computes."""
    scored_tokens: int
    """In the largest one that is scored."""
    num_micro_batches: int
    """Of an optimiser step on one rank, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What an engine will be given."""

    setup: EngineSetup
    device_bytes: int | None
    """Memory of one of its devices; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """What a backend tells: lines of one rank."""

    lines: tuple[MemoryLine, ...]
    untold: tuple[str, ...] = ()
    """What it holds besides and cannot tell, and why: whether the run fits is not known then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """What an engine tells: lines of one of its devices, and what fits its keys and values."""

    lines: tuple[MemoryLine, ...]
    kv_tokens: int | None = None
    """Tokens whose keys and values all devices of the engine hold together; None: not known before it starts."""
    notes: tuple[str, ...] = ()
    untold: tuple[str, ...] = ()
    """What it cannot tell, and which option would settle it: whether the run fits is not known then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportMemory:
    """What a push holds beside the weights."""

    trainer: tuple[MemoryLine, ...] = ()
    """On the rank of the policy that sends most."""
    engine: tuple[MemoryLine, ...] = ()
    """On each device of an engine."""


class TrainerPlanner:
    """A base beside `BackendDriver`, of backends that say what their ranks will hold."""

    @classmethod
    def memory(cls, config: Any, load: TrainerLoad) -> TrainerMemory:
        """What the rank that holds most will hold. Nothing is started, and no GPU, weight or process group need be there: sizes
        come from config.json, or from a model on the meta device. ModelError for a model that it could not train."""
        raise NotImplementedError

    @classmethod
    def memory_savers(cls, config: Any, load: TrainerLoad) -> Sequence[Mapping[str, Any]]:
        """Options that may lower it, each entry's together: `slime plan` asks `memory` again with each, and shows those that
        pass `problems` and do lower it."""
        return ()


class EnginePlanner:
    """A base beside `EngineDriver`."""

    @classmethod
    def memory(cls, config: Any, load: EngineLoad) -> EngineMemory | None:
        """What it will hold on each of its devices; None: not known. Nothing is started, and no GPU or weight need be there."""
        raise NotImplementedError


class TransportPlanner:
    """A base beside `TransportDriver`."""

    @classmethod
    def memory(cls, config: Any, num_bytes: int) -> TransportMemory | None:
        """What sending so many bytes of weights takes; None: it is not known."""
        raise NotImplementedError


def bytes_at(lines: Iterable[MemoryLine], moment: Moment, place: Literal["device", "host"] = "device") -> int:
    return sum(line.num_bytes for line in lines if line.place == place and moment in line.moments)


def peak_of(lines: Iterable[MemoryLine], place: Literal["device", "host"] = "device") -> tuple[Moment, int]:
    """The moment at which most is held, the first of equals, and how much."""
    told = list(lines)
    return max(((moment, bytes_at(told, moment, place)) for moment in Moment), key=lambda found: found[1])
