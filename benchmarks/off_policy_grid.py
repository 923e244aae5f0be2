"""The grid of off_policy.py: the measured settings and their runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

ROUNDED_ENGINE = Path(__file__).resolve().with_name("rounded_engine.py")

METHODS: dict[str, tuple[bool, str]] = {
    "rollout": (True, ""),
    "opsm": (True, '"opsm"'),
    "recomputed": (False, ""),
    "tis": (False, '"tis"'),
    "icepop": (False, '"icepop"'),
    "mis": (False, '{name = "mis", tis_level = "sequence", tis_mode = "mask"}'),
}
"""use_rollout_logprobs, and the correction as TOML."""
ENGINES: dict[str, list[str]] = {
    "float32": [],
    "float8": ["--plugin", str(ROUNDED_ENGINE), "--engine", "rounded", "--engine.weights", "float8_e4m3fn"],
}


@dataclass(frozen=True, slots=True)
class Block:
    """A part of the grid: every combination."""

    steps: int
    lr: tuple[float, ...]
    staleness: tuple[tuple[int, int], ...]
    """update_weights_interval, ahead."""
    engine: str = "float32"
    methods: tuple[str, ...] = tuple(METHODS)


SOME, MANY, FEW = (3e-4, 1e-3, 2e-3), (1e-4, 3e-4), (3e-3,)
"""Learning rates for 4, 16 and 1 steps on a batch: where this batch size learns on-policy, and, for 4, where it does not."""
GRID = (
    Block(4, SOME, ((4, 1), (2, 1))),
    # On-policy and in float32 the gap is 0: all methods are the same up to rounding, but for opsm.
    Block(4, SOME, ((1, 0),), methods=("rollout",)),
    Block(16, MANY, ((4, 1),)),
    Block(16, MANY, ((1, 0),), methods=("rollout",)),
    Block(1, FEW, ((4, 1),)),
    Block(1, FEW, ((1, 0),), methods=("rollout",)),
    Block(4, (1e-3,), ((1, 0),), engine="float8"),
)
"""In the order in which it is run, each block seed by seed."""
LEFT_OUT = {
    "tis": "train/tis_clipfrac",
    "icepop": "train/tis_clipfrac",
    "mis": "train/mis_mask_fraction",
    "opsm": "train/opsm_clipfrac",
}
"""Share of trained tokens whose weight a correction clips or sets to 0."""


class Cell(NamedTuple):
    """The settings that all methods and seeds of a cell share."""

    lr: float
    steps: int
    interval: int
    ahead: int
    engine: str


Cells: TypeAlias = Mapping[Cell, Mapping[str, Sequence[Mapping[str, Any]]]]
"""The lines of each cell, by method."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One run."""

    lr: float
    steps: int
    """Optimizer steps per rollout."""
    interval: int
    """update_weights_interval."""
    ahead: int
    engine: str
    method: str
    seed: int

    @property
    def cell(self) -> Cell:
        return Cell(self.lr, self.steps, self.interval, self.ahead, self.engine)

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in asdict(self).values())


def setting_of(line: dict[str, Any]) -> Setting:
    return Setting(**{name: line[name] for name in Setting.__dataclass_fields__})
