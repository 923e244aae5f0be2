"""Driver of `engine.name = "vllm"`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from slime_core.contracts.driver import Patch
from slime_core.contracts.engine import Capability, EngineDriver
from slime_core.contracts.setup import EngineLayout
from slime_serving.adapter_options import AdapterOptions
from slime_serving.interpreter import StartsProgram
from slime_training.adapters.drivers import AdapterSampler
from slime_training.memory_plan import EnginePlanner
from slime_vllm.config import make_config
from slime_vllm.option_checks import problems_of_layout, problems_of_options, problems_of_push
from slime_vllm.program import VLLM

if TYPE_CHECKING:
    from slime_serving.calls import HttpCaller
    from slime_training.memory_plan import EngineLoad, EngineMemory
    from slime_vllm.engine import VllmEngine


class Vllm(EnginePlanner, AdapterSampler, StartsProgram, EngineDriver):
    """vLLM servers as subprocesses, in an interpreter of their own, or external ones."""

    Config = make_config()
    program = VLLM
    transports: ClassVar[tuple[str, ...]] = ("direct", "ipc", "distributed", "disk", "delta", "adapter", "frozen")
    optional_capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.VERSION_SPANS,
            Capability.SCORES,
            Capability.HTTP,
            Capability.IMAGES,
            Capability.SLEEP,
            Capability.STRUCTURAL_TAG,
            Capability.REPETITION_PENALTY,
            Capability.ADAPTERS,
        }
    )
    independent_requests = True

    @classmethod
    def max_adapters(cls, config: AdapterOptions) -> int:
        return config.most_adapters

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
        return problems_of_push(config, quantization)

    @classmethod
    def memory(cls, config: Any, load: EngineLoad) -> EngineMemory | None:
        from slime_vllm.memory import engine_memory

        return engine_memory(config, load)

    @classmethod
    def build(cls, config: Any) -> VllmEngine:
        from slime_vllm.engine import VllmEngine

        return VllmEngine(config)

    @classmethod
    def build_caller(cls, config: Any, *, max_calls: int) -> HttpCaller:
        from slime_serving.calls import HttpCaller

        return HttpCaller(max_calls=max_calls)
