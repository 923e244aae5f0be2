"""Which layers a stage of the pipeline has: as many as the others, or those that Megatron's options for uneven stages set.

A piece is the part of the model on one virtual stage. The model has pipeline x virtual pipeline pieces, which the pipeline
stages hold round-robin.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

EMBEDDING, DECODER, LOSS, PREDICTION = "embedding", "decoder", "loss", "mtp"
LETTERS: Final = {"E": EMBEDDING, "t": DECODER, "L": LOSS, "m": PREDICTION}
"""Letters of Megatron's PipelineParallelLayerLayout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Megatron's own options, under its names."""

    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool | None = None
    account_for_loss_in_pipeline_split: bool | None = None
    pipeline_model_parallel_layout: str | Sequence[Sequence[str]] | None = None

    @property
    def given(self) -> list[str]:
        """Names of the options that are set."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return [name for name, value in values.items() if value is not None and value is not False]


def stage_problems(stages: Stages, pp: int, vpp: int, layers: int | None) -> list[str]:
    """Why `layers` (None: not in config.json) cannot be split into pp x vpp pieces with these options, and which values fit."""
    if not layers:
        return []
    given = stages.given
    uneven = [name for name in given if name.startswith("num_layers_in_")]
    counted = [name for name in given if name.startswith("account_for_")]
    ways = [names for names in (uneven, counted, given[-1:] if stages.pipeline_model_parallel_layout else []) if names]
    if len(ways) > 1:
        return [f"backend.{' and '.join(given)}: these are different ways to split the pipeline. Set one of them."]
    if stages.pipeline_model_parallel_layout:
        return layout_problems(stages.pipeline_model_parallel_layout, pp, vpp, layers)
    if uneven:
        return uneven_problems(stages, uneven, pp, vpp, layers)
    pieces, total = pp * vpp, layers + len(counted)
    if total % pieces == 0:
        return []
    near = nearest(pieces, [d for d in divisors(total) if d % vpp == 0])
    would = f"; the nearest that do: {near} pieces." if near else "."
    asked = f"backend.pipeline_model_parallel_size = {pp}"
    asked += f" with virtual_pipeline_model_parallel_size = {vpp}" if vpp > 1 else ""
    asked += "".join(f" and {name}" for name in counted)
    cut = f"{layers} layers and {len(counted)} more" if counted else f"{layers} layers"
    return [
        f"{asked}: {pieces} pieces do not divide the model's {cut}{would}"
        + ("" if counted else proposal(pp, vpp, layers))
    ]


def proposal(pp: int, vpp: int, layers: int) -> str:
    """Options that split `layers` into pp x vpp pieces; the last ones, with the head, get fewer. Empty: too few layers."""
    pieces = pp * vpp
    if layers < pieces:
        return ""
    each = -(-layers // pieces) * vpp
    last = layers - (pp - 1) * each
    if last <= 0:
        each -= vpp
        last = layers - (pp - 1) * each
    if layers % vpp == 0 and last <= 2 * each:
        return f" Or set num_layers_in_last_pipeline_stage = {last}: the other stages then have {each} each."
    small, more = divmod(layers, pieces)
    words = [f"t*{small + (number < more)}" for number in range(pieces)]
    return f' Or set pipeline_model_parallel_layout = "E{"|".join(words)}L".'


def uneven_problems(stages: Stages, asked: Sequence[str], pp: int, vpp: int, layers: int) -> list[str]:
    counts = {name: int(getattr(stages, name)) for name in asked}
    described = " with ".join(f"{name} = {count}" for name, count in counts.items())
    if pp == 1:
        return [f"backend.{described}: requires a pipeline_model_parallel_size of at least 2."]
    problems = [
        f"backend.{name} = {count}: each stage has {vpp} pieces of equal size. Set a multiple of {vpp}, at least {vpp}."
        for name, count in counts.items()
        if count < 1 or count % vpp
    ]
    if problems:
        return problems
    between = pp - len(counts)

    def fits(rest: int) -> bool:
        return rest == 0 if between == 0 else rest > 0 and rest % (between * vpp) == 0

    rest = layers - sum(counts.values())
    if fits(rest):
        return []
    *_, (name, count) = counts.items()
    near = nearest(count, [n for n in range(vpp, layers, vpp) if fits(rest + count - n)])
    of_those = f" with {vpp} pieces each" if vpp > 1 else ""
    return [
        f"backend.{described}: leaves {rest} of the model's {layers} layers for {between} other stages{of_those}; the nearest "
        f"values of {name} that fit: {near or 'none'}."
    ]


def layout_problems(layout: str | Sequence[Sequence[str]], pp: int, vpp: int, layers: int) -> list[str]:
    asked = f'backend.pipeline_model_parallel_layout = "{layout}"'
    pieces = read_layout(layout)
    if pieces is None:
        return [
            f'{asked}: is not a layout. Set pieces between "|", with E for the embedding, t for a layer and L for the '
            f"loss{example(pp * vpp)}"
        ]
    every = [name for piece in pieces for name in piece]
    problems = []
    if PREDICTION in every:
        problems.append(f"{asked}: layers of multi-token prediction are on the last stage here. Leave m (mtp) out.")
    if [name for name in every if name != PREDICTION] != [EMBEDDING, *[DECODER] * every.count(DECODER), LOSS]:
        problems.append(f"{asked}: it starts with E and ends with L, with layers (t) between{example(pp * vpp)}")
    if len(pieces) != pp * vpp:
        needed = f"pipeline_model_parallel_size = {pp}" + (
            f" x virtual_pipeline_model_parallel_size = {vpp}" * (vpp > 1)
        )
        more = (
            f" Or set virtual_pipeline_model_parallel_size = {len(pieces) // pp}."
            if pp > 1 and not len(pieces) % pp
            else ""
        )
        problems.append(f"{asked}: has {len(pieces)} pieces, and {needed} requires {pp * vpp}.{more}")
    if every.count(DECODER) != layers:
        problems.append(f"{asked}: has {every.count(DECODER)} layers (t), and the model {layers}.")
    return problems


def example(pieces: int) -> str:
    return f', as in "E{"|".join(["tt"] * pieces)}L".'


def read_layout(layout: str | Sequence[Sequence[str]]) -> list[list[str]] | None:
    """Names in each piece, the way Megatron reads them; None: Megatron cannot read it."""
    if not isinstance(layout, str):
        if not isinstance(layout, list | tuple):
            return None
        names = set(LETTERS.values())
        rows = [
            [str(name).strip().lower() for name in row] if isinstance(row, list | tuple) else [""] for row in layout
        ]
        return rows if all(name in names for row in rows for name in row) else None
    text = layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    if not set(text) <= {*LETTERS, "|"}:
        return None
    return [[LETTERS[letter] for letter in piece] for piece in text.split("|")]


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def nearest(asked: int, allowed: list[int]) -> str:
    """The largest allowed value below and the smallest above."""
    below = [value for value in allowed if value < asked]
    above = [value for value in allowed if value > asked]
    return " or ".join(str(value) for value in [*below[-1:], *above[:1]])
