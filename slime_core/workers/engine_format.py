"""EngineFormat: the format of the policy's weights in the engines, where it is not that of the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.config.part import PluginSpec
from slime_core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from slime_core.contracts.converter import TensorFormat
    from slime_core.workers.agreement import Agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFormat:
    """Plain data for the trainer's ranks."""

    converter: PluginSpec
    folder: Path
    """Folder that the engines start from."""

    def build(self, agreement: Agreement, registry: Registry) -> TensorFormat:
        made: TensorFormat = agreement.resolve(self.converter, registry).driver.tensor_format(self.folder)
        return made


def converted(made_by: TensorFormat, layer: Mapping[str, Tensor] | None) -> Mapping[str, Tensor] | None:
    """A layer of an export in the engines' format; None on ranks that do not have it."""
    return None if layer is None else made_by.converted(layer)
