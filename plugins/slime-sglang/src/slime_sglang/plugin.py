"""Driver of `engine.name = "sglang"`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from slime_core.contracts.driver import Patch, TableOptions
from slime_core.contracts.engine import Capability, EngineDriver
from slime_core.contracts.setup import EngineLayout
from slime_serving.adapter_options import AdapterOptions
from slime_serving.interpreter import StartsProgram
from slime_sglang import router_args
from slime_sglang.config import SglangOptions, make_config, may_return_experts, rename_notices
from slime_sglang.option_checks import problems_of_layout, problems_of_options, problems_of_push
from slime_sglang.program import SGLANG
from slime_sglang.server.hook_table import HOOKS, in_source
from slime_training.adapters.drivers import AdapterSampler
from slime_training.memory_plan import EnginePlanner

if TYPE_CHECKING:
    from slime_serving.calls import HttpCaller
    from slime_sglang.engine import SglangEngine
    from slime_training.memory_plan import EngineLoad, EngineMemory


class Sglang(AdapterSampler, EnginePlanner, StartsProgram, EngineDriver):
    """SGLang servers as subprocesses, or external ones; optionally behind sglang-router."""

    Config = make_config()
    program = SGLANG
    transports: ClassVar[tuple[str, ...]] = ("direct", "ipc", "distributed", "disk", "delta", "frozen")
    optional_capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.DETERMINISTIC,
            Capability.BATCH_INVARIANT,
            Capability.VERSION_SPANS,
            Capability.SLEEP,
            Capability.SCORES,
            Capability.CHECKSUM,
            Capability.HTTP,
            Capability.IMAGES,
            Capability.STRUCTURAL_TAG,
            Capability.ADAPTERS,
        }
    ) | ({Capability.ROUTED_EXPERTS} if may_return_experts() else frozenset())

    independent_requests = True
    supports_quantized_weights = True
    spans_nodes = True
    flag_aliases: ClassVar[Mapping[str, str]] = {
        "rollout-external-engine-addrs": "external_engine_addrs",
        "router-policy": "router_policy",
    }

    @classmethod
    def max_adapters(cls, config: AdapterOptions) -> int:
        return config.most_adapters

    @classmethod
    def draws_by_seed(cls, config: SglangOptions, device: str) -> bool:
        return device == "cpu" if config.deterministic is None else config.deterministic

    @classmethod
    def table_options(cls) -> Sequence[TableOptions]:
        return [TableOptions(option="router_options", prefix="router-", fields=router_args.fields())]

    @classmethod
    def problems(cls, config: Any) -> list[str]:
        return problems_of_options(config)

    @classmethod
    def notices(cls, config: Any) -> list[str]:
        return rename_notices(config)

    @classmethod
    def patches(cls) -> Sequence[Patch]:
        return [
            Patch(target=target, purpose=hook.purpose, when=hook.when, found=in_source(target))
            for hook in HOOKS
            for target in hook.targets
        ]

    @classmethod
    def layout_problems(cls, config: Any, layout: EngineLayout) -> list[str]:
        return problems_of_layout(config, layout)

    @classmethod
    def push_problems(cls, config: Any, quantization: Mapping[str, Any] | None) -> list[str]:
        return problems_of_push(config, quantization)

    @classmethod
    def memory(cls, config: Any, load: EngineLoad) -> EngineMemory | None:
        from slime_sglang.memory import engine_memory

        return engine_memory(config, load)

    @classmethod
    def build(cls, config: Any) -> SglangEngine:
        from slime_sglang.engine import SglangEngine

        return SglangEngine(config)

    @classmethod
    def build_caller(cls, config: Any, *, max_calls: int) -> HttpCaller:
        from slime_serving.calls import HttpCaller

        return HttpCaller(max_calls=max_calls)
