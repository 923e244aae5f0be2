"""AdapterOptions: options of an engine whose servers may hold LoRA adapters. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pydantic import Field

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.setup import EngineLayout

MOST_AT_ONCE: Final = 8
DEFAULT_RANK: Final = 32


class AdapterOptions(DriverConfig):
    """Options of an engine whose servers may hold adapters. None: the default, which a run does not record."""

    max_adapters: int | None = Field(default=None, ge=0)
    """LoRA adapters that each server holds at a time beside its weights, for a loop of one's own (`Adapter.snapshot`) and for
    `slime serve`. The weights are frozen then: set sync.transport = "frozen". By default 0: none."""
    max_adapter_rank: int | None = Field(default=None, ge=1)
    """Largest rank of these adapters. By default 32."""
    adapters_at_once: int | None = Field(default=None, ge=1)
    """Adapters in the memory of a server's devices; the others are in its host's memory, and their requests wait for a place.
    Each place takes the memory of an adapter of the largest rank. By default all, up to 8."""

    @property
    def keeps_weights(self) -> bool:
        """Its servers take no new weights."""
        return bool(self.max_adapters)

    @property
    def most_adapters(self) -> int:
        return self.max_adapters or 0

    @property
    def adapter_rank(self) -> int:
        return DEFAULT_RANK if self.max_adapter_rank is None else self.max_adapter_rank

    @property
    def adapter_places(self) -> int:
        """Of a server with adapters."""
        asked = MOST_AT_ONCE if self.adapters_at_once is None else self.adapters_at_once
        return min(asked, self.most_adapters)


def problems_of_adapters(config: AdapterOptions, layout: EngineLayout, stages: int) -> list[str]:
    """Options that exclude adapters. `stages`: of a server's pipeline."""
    if not config.most_adapters:
        return [
            f"engine.{name} = {given}: the engine holds no adapters. Set engine.max_adapters, or leave it out."
            for name in ("max_adapter_rank", "adapters_at_once")
            if (given := getattr(config, name)) is not None
        ]
    where = f"engine.max_adapters = {config.max_adapters}"
    problems = []
    if layout.adapter_rank:
        problems.append(
            f'{where}, sync.transport = "adapter": that one is the run\'s only adapter. Leave one of them out.'
        )
    if problem := problem_of_offload(config, offload=layout.offload):
        problems.append(problem)
    if stages > 1:
        problems.append(
            f"{where}: a pipeline stage does not know the layers of another one, so parts of an adapter that are lost would "
            "not be noticed. Use tensor parallelism."
        )
    return problems


def problem_of_offload(config: AdapterOptions, *, offload: bool) -> str | None:
    """`offload`: whether servers are to give their memory back."""
    if not (config.most_adapters and offload):
        return None
    return (
        f"engine.max_adapters = {config.max_adapters}, launcher.offload_rollout: a loop of one's own samples at any time, so "
        "servers cannot give their memory back. Pass --no-offload-rollout."
    )


def linear_sizes(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, int]]:
    """Features out and in of the layers that an adapter can have matrices for, by name: the linear ones of the decoder's
    layers, without experts, and the output layer. shapes: of a model folder's tensors.

    >>> linear_sizes({"model.layers.0.mlp.up_proj.weight": (8, 4), "model.layers.0.norm.weight": (4,),
    ...               "model.layers.0.mlp.experts.0.down_proj.weight": (4, 8), "model.embed_tokens.weight": (9, 4)})
    {'model.layers.0.mlp.up_proj': (8, 4), 'lm_head': (9, 4)}
    """
    found: dict[str, tuple[int, int]] = {}
    head = None
    for name, shape in shapes.items():
        layer, _, last = name.rpartition(".")
        parts = layer.split(".")
        if len(shape) != 2 or last != "weight":
            continue
        if parts[-1] == "lm_head" or (head is None and parts[-1] == "embed_tokens"):
            head = (shape[0], shape[1])
        elif "layers" in parts and "experts" not in parts:
            found[layer] = (shape[0], shape[1])
    return found if head is None else found | {"lm_head": head}
