"""OneRank and OneEngine: the two ends of a weight update without a run, for tests of transports on real servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from torch import Tensor, nn

from slime_core.contracts.engine import RolloutEngine
from slime_core.contracts.setup import EngineEndpoint
from slime_core.contracts.transport import SenderSetup, SentReport, TransportDriver
from slime_core.types.report import WeightUpdateReport

BUCKET: Final = 4096
"""Bytes: a tiny model is about twenty buckets."""


class OneRank:
    """`TrainerLink` of one rank whose weights are a transformers model's, as float32; of tied ones the first."""

    def __init__(
        self,
        driver: type[TransportDriver],
        run_dir: Path,
        model: nn.Module,
        *,
        device: Literal["cpu", "cuda"] = "cpu",
        colocated: bool = True,
        adapter_config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.model = model
        self.device = device
        settings = {"update_weight_buffer_size": BUCKET, "update_weights_timeout": 30.0} | options
        self.config = driver.Config(**settings)
        sender = driver.build_sender(self.config)
        assert sender is not None, "a transport with senders"
        self.sender = sender
        self.transport = driver.build(self.config)
        self.sender.setup(
            SenderSetup(
                rank=0,
                world_size=1,
                device=device,
                model_path=run_dir,
                run_dir=run_dir,
                colocated=colocated,
                adapter_config=adapter_config,
            )
        )

    def export(self, *, all_ranks: bool) -> Iterator[Mapping[str, Tensor]]:
        for name, tensor in self.model.named_parameters():
            yield {name: tensor.detach().float().to(self.device)}

    async def send(self, version: int, engines: Sequence[EngineEndpoint]) -> list[SentReport]:
        return [await asyncio.to_thread(self.sender.send, self.export, version, engines)]

    async def stream_weights(self, version: int, bucket_bytes: int) -> AsyncIterator[Any]:
        """None: its transport has senders."""
        nothing: tuple[Any, ...] = ()
        for bucket in nothing:
            yield bucket

    async def push(self, engine: RolloutEngine, version: int) -> WeightUpdateReport:
        """The engine is paused."""
        return await self.transport.push(self, OneEngine(engine), version)


class OneEngine:
    """`EngineGroup` of one engine in this loop."""

    num_engines = 1

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine

    async def call_all(self, method: str, *args: Any) -> Sequence[Any]:
        return [await getattr(self.engine, method)(*args)]
