"""Drivers of `sync.transport = "ipc"`, "distributed", "disk", "delta", "adapter" and "frozen"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from slime_core.contracts.transport import TransportDriver
from slime_training.memory_plan import MemoryItem, MemoryPhase, TransportMemory, TransportPlanner
from slime_transports.config import AdapterConfig, DeltaConfig, DiskConfig, DistributedConfig, FrozenConfig, IpcConfig

if TYPE_CHECKING:
    from slime_core.contracts.example import Example
    from slime_core.contracts.setup import EngineLayout
    from slime_transports.adapter import AdapterSender
    from slime_transports.delta import DeltaSender
    from slime_transports.disk import DiskSender
    from slime_transports.distributed import DistributedSender
    from slime_transports.frozen import FrozenTransport
    from slime_transports.ipc import IpcSender
    from slime_transports.sender_transport import SenderTransport


def compares_sent(engine: Any) -> bool:
    """Whether the engine's options state that its servers compare what they hold with what is sent to them once more, as their
    receiver does: whatever they make of it, and wherever they were started."""
    return bool(getattr(engine, "compares_sent", False))


def unnamed(engine: Any) -> str | None:
    """Why an engine's servers cannot be compared with the trainer, as far as it is known before the start."""
    if compares_sent(engine):
        return None
    if engine.external_engine_addrs:
        return "engine.external_engine_addrs: servers that slime did not start"
    if getattr(engine, "quantization", None) is not None:
        return f'engine.quantization = "{engine.quantization}"'
    return None


def kept_weights(engine: Any) -> list[str]:
    """A problem if the engine's servers take no new weights."""
    if not getattr(engine, "keeps_weights", False):
        return []
    return [
        f"engine.max_adapters = {engine.max_adapters}: servers with adapters keep the weights of their folder. Pass "
        "--transport frozen."
    ]


class SentDriver(TransportPlanner, TransportDriver):
    serves: ClassVar[tuple[str, ...]] = ("sglang", "vllm")
    by_rank: ClassVar[bool] = False
    """Weights are sent to every process of a server, which SGLang identifies only by its tensor-parallel rank."""

    by_folder: ClassVar[bool] = False
    """Servers load files, and SGLang loads them into the draft of speculative decoding too, whatever model that is."""

    @classmethod
    def problems(cls, config: Any, engine: Any) -> list[str]:
        name, problems = cls.__name__.lower(), kept_weights(engine)
        stages = getattr(engine, "pp_size", None) or 1
        if cls.by_rank and stages > 1:
            problems.append(
                f'sync.transport = "{name}", engine.pp_size = {stages}: SGLang gives the pipeline stages of a server equal '
                'ranks, so they cannot be distinguished. Set sync.transport = "disk", "delta" or "direct", or pp_size = 1.'
            )
        if config.check_weight_update_equal and stages > 1:
            problems.append(
                f"sync.check_weight_update_equal = true, engine.pp_size = {stages}: only the first pipeline stage of a server "
                "responds, so the weights of the others would not be compared. Omit it, or set pp_size = 1."
            )
        if config.post_write_hook is not None and not cls.by_folder:
            problems.append(
                f'sync.post_write_hook, sync.transport = "{name}": it writes no files. Omit the hook, or set sync.transport = '
                '"disk" or "delta".'
            )
        draft = getattr(engine, "speculative_draft_model_path", None)
        if cls.by_folder and draft is not None:
            problems.append(
                f'sync.transport = "{name}", engine.speculative_draft_model_path = "{draft}": SGLang would load the trained '
                'weights into the draft too. Set sync.transport = "ipc", "distributed" or "direct".'
            )
        return problems

    @classmethod
    def memory(cls, config: Any, num_bytes: int) -> TransportMemory | None:
        """Two buckets on each side. None for transports by files, which are not estimated."""
        if cls.by_folder:
            return None
        size = min(2 * config.update_weight_buffer_size, num_bytes)
        line = MemoryItem(component="two buckets", num_bytes=size, moments=frozenset({MemoryPhase.SYNC}))
        return TransportMemory(trainer=(line,), engine=(line,))

    @classmethod
    def layout_problems(cls, config: Any, engine: Any, layout: EngineLayout) -> list[str]:
        """Problems of servers that can be compared neither with the trainer nor with one another."""
        why = unnamed(engine) if config.check_weight_update_equal else None
        if why is None or layout.num_engines * engine.servers > 1:
            return []
        return [
            f"sync.check_weight_update_equal = true, {why}: such a server cannot name its tensors to compare with the "
            "trainer's, and there is no second one to compare it with. Omit it, or pass --rollout-num-gpus "
            f"{2 * layout.num_devices} for two engines, which are then compared with one another."
        ]

    @classmethod
    def push_problems(cls, config: Any, engine: Any, quantization: Mapping[str, Any] | None) -> list[str]:
        if quantization is None or not config.check_weight_update_equal or compares_sent(engine):
            return []
        return [
            "sync.check_weight_update_equal = true: the engines' weights are quantized, and servers cannot name the parts of "
            "such weights. Omit it."
        ]

    @classmethod
    def build(cls, config: Any) -> SenderTransport:
        from slime_transports.sender_transport import SenderTransport

        return SenderTransport()

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_core.contracts.example import TransportExample
        from slime_transports.in_process_server import endpoint, serve

        return (TransportExample(options={"update_weight_buffer_size": 64}, mock_server=serve, endpoint=endpoint),)


class Ipc(SentDriver):
    """Trainer and engines on the same devices: engines copy from the trainer's memory (CUDA IPC; on a CPU a mapped file)."""

    Config = IpcConfig
    by_rank: ClassVar[bool] = True

    @classmethod
    def build_sender(cls, config: Any) -> IpcSender:
        from slime_transports.ipc import IpcSender

        return IpcSender(config)


class Distributed(SentDriver):
    """The first trainer rank broadcasts to all engines' ranks: NCCL on GPUs, gloo on a CPU."""

    Config = DistributedConfig
    by_rank: ClassVar[bool] = True

    @classmethod
    def build_sender(cls, config: Any) -> DistributedSender:
        from slime_transports.distributed import DistributedSender

        return DistributedSender(config)


class Disk(SentDriver):
    """Writes safetensors to the run's folder, which engines on other machines must have under the same path."""

    Config = DiskConfig
    by_folder: ClassVar[bool] = True

    @classmethod
    def build_sender(cls, config: Any) -> DiskSender:
        from slime_transports.disk import DiskSender

        return DiskSender(config)


class Delta(SentDriver):
    """Writes only the changes since the last version, compressed, to the run's folder. The trainer's first rank keeps a copy
    of the weights in host memory. Requires servers that slime starts."""

    Config = DeltaConfig
    by_folder: ClassVar[bool] = True

    @classmethod
    def push_problems(cls, config: Any, engine: Any, quantization: Mapping[str, Any] | None) -> list[str]:
        if quantization is None:
            return []
        return [
            'sync.transport = "delta": the engines\' weights are quantized, and deltas require unquantized weights. Set '
            '"ipc", "distributed" or "disk".'
        ]

    @classmethod
    def build_sender(cls, config: Any) -> DeltaSender:
        from slime_transports.delta import DeltaSender

        return DeltaSender(config)


class Adapter(SentDriver):
    """Writes the LoRA adapter that is trained, in peft's format, to the run's folder, which engines on other machines must have
    under the same path. The engines keep the weights of their folder."""

    Config = AdapterConfig
    serves: ClassVar[tuple[str, ...]] = ("vllm",)
    by_folder: ClassVar[bool] = True
    sends_adapters: ClassVar[bool] = True

    @classmethod
    def problems(cls, config: Any, engine: Any) -> list[str]:
        problems = super().problems(config, engine)
        if config.check_weight_update_equal and not problems:
            problems.append(
                'sync.check_weight_update_equal = true, sync.transport = "adapter": servers cannot name the parts of an '
                "adapter that they hold. Omit it."
            )
        return problems

    @classmethod
    def build_sender(cls, config: Any) -> AdapterSender:
        from slime_transports.adapter import AdapterSender

        return AdapterSender(config)


class Frozen(TransportPlanner, TransportDriver):
    """Sends nothing: for engines with adapters (`engine.max_adapters`) over weights that the trainer never changes. The engines
    keep the weights of their folder."""

    Config = FrozenConfig
    serves: ClassVar[tuple[str, ...]] = ("sglang", "vllm")
    sends_nothing = True

    @classmethod
    def problems(cls, config: Any, engine: Any) -> list[str]:
        if getattr(engine, "keeps_weights", False):
            return []
        return [
            'sync.transport = "frozen": engines would never get what is trained. Set engine.max_adapters, for adapters over '
            "frozen weights, or pass another --transport."
        ]

    @classmethod
    def memory(cls, config: Any, num_bytes: int) -> TransportMemory:
        return TransportMemory()

    @classmethod
    def build(cls, config: Any) -> FrozenTransport:
        from slime_transports.frozen import FrozenTransport

        return FrozenTransport()
