"""What the entry points of `slime.media` name. Nothing heavy is imported here."""

from __future__ import annotations

from typing import ClassVar

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.engine import Capability
from slime_core.contracts.media import Media, MediaDriver


class QwenVlDriver(MediaDriver):
    """What both modalities share."""

    @classmethod
    def build(cls, config: DriverConfig) -> Media:
        from slime_models.media.qwen_vl import QwenVl

        return QwenVl()


class Images(QwenVlDriver):
    """Pictures, each where `<image>` is in the messages."""

    needs: ClassVar[Capability] = Capability.IMAGES


class Videos(QwenVlDriver):
    """Videos, each where `<video>` is in the messages."""

    needs: ClassVar[Capability] = Capability.VIDEOS
