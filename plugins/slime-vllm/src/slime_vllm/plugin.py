"""Driver of `engine.name = "vllm"`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from slime_core.contracts.driver import Patch
from slime_core.contracts.engine import Capability, EngineDriver
from slime_core.contracts.setup import EngineLayout
from slime_vllm.config import make_config
from slime_vllm.option_checks import problems_of_layout, problems_of_options

if TYPE_CHECKING:
    from slime_vllm.engine import VllmEngine


class Vllm(EngineDriver):
    """vLLM servers as subprocesses, in an interpreter of their own, or external ones."""

    Config = make_config()
    transports: ClassVar[tuple[str, ...]] = ("direct", "ipc", "distributed", "disk", "delta")
    optional_capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.VERSION_SPANS, Capability.SCORES})

    @classmethod
    def patches(cls) -> Sequence[Patch]:
        return []

    @classmethod
    def problems(cls, config: Any) -> list[str]:
        return problems_of_options(config)

    @classmethod
    def layout_problems(cls, config: Any, layout: EngineLayout) -> list[str]:
        return problems_of_layout(config, layout)

    @classmethod
    def push_problems(cls, config: Any, quantization: Mapping[str, Any] | None) -> list[str]:
        if quantization is None and getattr(config, "quantization", None) is None:
            return []
        return [
            "engine: with quantized weights, vLLM quantizes each layer again that it loads again, which was not tried with "
            "slime-vllm. Omit engine.quantization and model.rollout_load, or use engine sglang."
        ]

    @classmethod
    def build(cls, config: Any) -> VllmEngine:
        from slime_vllm.engine import VllmEngine

        return VllmEngine(config)
