"""EngineFormat: how the policy's engines hold its weights, where that is not how they are trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.config.part import PartSpec
from slime_core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from slime_core.contracts.converter import TensorFormat
    from slime_core.workers.agreement import Agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFormat:
    """As it travels to the trainer's ranks."""

    converter: PartSpec
    folder: Path
    """That the engines start from."""

    def build(self, agreement: Agreement, registry: Registry) -> TensorFormat:
        made: TensorFormat = agreement.resolve(self.converter, registry).driver.tensor_format(self.folder)
        return made


def converted(made_by: TensorFormat, layer: Mapping[str, Tensor] | None) -> Mapping[str, Tensor] | None:
    """A layer of an export, which other ranks than the first may not have."""
    return None if layer is None else made_by.converted(layer)
