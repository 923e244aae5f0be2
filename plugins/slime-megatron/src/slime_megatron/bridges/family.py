"""Families of models: the classes of the entry points in `slime_megatron.bridges`, and which ones are installed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final

from slime_core.errors import near_matches

if TYPE_CHECKING:
    # Imports torch.
    from slime_megatron.bridges.bridge import Bridge

BRIDGES: Final = "slime_megatron.bridges"
"""Entry-point group: `model_type` of a config.json to the bridge of its family."""


class Family(ABC):
    """One `model_type`; never instantiated."""

    @classmethod
    @abstractmethod
    def load(cls) -> type[Bridge]:
        """Imports and returns the bridge; heavy imports happen here."""


@cache
def families() -> tuple[str, ...]:
    return tuple(sorted({entry.name for entry in entry_points(group=BRIDGES)}))


def family_problems(model_config: Mapping[str, Any]) -> list[str]:
    model_type = model_config.get("model_type")
    if model_type is None:
        return ["the model's config.json has no model_type."]
    if model_type in families():
        return []
    close = near_matches(model_type, families())
    hint = f"; close: {', '.join(close)}" if close else ""
    return [
        f'model_type = "{model_type}" in the model\'s config.json: backend megatron has no bridge for this family{hint}. '
        f"Bridges: {', '.join(families())}. A distribution can register one in the entry-point group {BRIDGES}."
    ]
