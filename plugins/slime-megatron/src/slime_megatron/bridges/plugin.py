"""Drivers of the entry points in `slime_megatron.bridges`: families, without heavy imports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_megatron.bridges.family import Family

if TYPE_CHECKING:
    from slime_megatron.bridges.bridge import Bridge


class Llama(Family):
    """Llama 3 and 2."""

    @classmethod
    def load(cls) -> type[Bridge]:
        from slime_megatron.bridges.dense import Llama

        return Llama


class Qwen2(Family):
    """Qwen2 and Qwen2.5."""

    @classmethod
    def load(cls) -> type[Bridge]:
        from slime_megatron.bridges.dense import Qwen2

        return Qwen2


class Mimo(Family):
    """MiMo-7B."""

    @classmethod
    def load(cls) -> type[Bridge]:
        from slime_megatron.bridges.dense import Mimo

        return Mimo


class Qwen3(Family):
    """Qwen3, dense."""

    @classmethod
    def load(cls) -> type[Bridge]:
        from slime_megatron.bridges.dense import Qwen3

        return Qwen3


class Glm4(Family):
    """GLM-4-0414 and Z1."""

    @classmethod
    def load(cls) -> type[Bridge]:
        from slime_megatron.bridges.dense import Glm4

        return Glm4


class Qwen3Moe(Family):
    """Qwen3, mixture of experts."""

    @classmethod
    def load(cls) -> type[Bridge]:
        from slime_megatron.bridges.experts import Qwen3Moe

        return Qwen3Moe


class Qwen3Next(Family):
    """Qwen3-Next."""

    @classmethod
    def load(cls) -> type[Bridge]:
        from slime_megatron.bridges.linear import Qwen3Next

        return Qwen3Next


class Qwen35(Family):
    """Qwen3.5, dense."""

    @classmethod
    def load(cls) -> type[Bridge]:
        from slime_megatron.bridges.linear import Qwen35

        return Qwen35


class Qwen35Moe(Family):
    """Qwen3.5, mixture of experts."""

    @classmethod
    def load(cls) -> type[Bridge]:
        from slime_megatron.bridges.linear import Qwen35Moe

        return Qwen35Moe


class MiniMaxM2(Family):
    """MiniMax-M2, M2.1, M2.5."""

    @classmethod
    def load(cls) -> type[Bridge]:
        from slime_megatron.bridges.experts import MiniMaxM2

        return MiniMaxM2


class Glm4Moe(Family):
    """GLM-4.5, 4.6, 4.7."""

    @classmethod
    def load(cls) -> type[Bridge]:
        from slime_megatron.bridges.experts import Glm4Moe

        return Glm4Moe


class Glm4MoeLite(Family):
    """GLM-4.7-Flash."""

    @classmethod
    def load(cls) -> type[Bridge]:
        from slime_megatron.bridges.mla import Glm4MoeLite

        return Glm4MoeLite


class GlmMoeDsa(Family):
    """GLM-5."""

    @classmethod
    def load(cls) -> type[Bridge]:
        from slime_megatron.bridges.mla import GlmMoeDsa

        return GlmMoeDsa


class DeepseekV32(Family):
    """DeepSeek V3.2."""

    @classmethod
    def load(cls) -> type[Bridge]:
        from slime_megatron.bridges.mla import DeepseekV32

        return DeepseekV32


class DeepseekV3(Family):
    """DeepSeek V3, V3.1, R1; Kimi K2 and Moonlight share its layout."""

    @classmethod
    def load(cls) -> type[Bridge]:
        from slime_megatron.bridges.mla import DeepseekV3

        return DeepseekV3
