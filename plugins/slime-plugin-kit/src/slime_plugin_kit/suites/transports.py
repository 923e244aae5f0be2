"""Weight transports, between a trainer and two engines that follow a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor

from slime_core.contracts.example import TransportExample
from slime_core.contracts.setup import EngineEndpoint
from slime_core.contracts.transport import SenderSetup, SentReport, WeightSender, WeightTransport
from slime_core.errors import EngineError
from slime_core.types.report import WeightUpdateReport
from slime_core.types.weights import Bucket
from slime_plugin_kit.case import Case
from slime_plugin_kit.event_loop import run
from slime_plugin_kit.scripted_engine import ScriptedEngine, checksum_of


def weights_of(version: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(version)
    shapes = {
        "model.embed": (7, 4),
        "model.layers.0.up": (4, 5),
        "model.norm": (4,),
        "lm_head": (7, 4),
        "empty": (0, 3),
    }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


class Exporter:
    """`slime_core.contracts.transport.TrainerLink`: a tensor a bucket, or a tensor at a time to the sender."""

    def __init__(self, *, empty: bool = False) -> None:
        self.sizes: list[int] = []
        self.sender: WeightSender | None = None
        self._empty = empty

    def _weights(self, version: int) -> dict[str, np.ndarray[Any, Any]]:
        return {} if self._empty else weights_of(version)

    async def stream_weights(self, version: int, bucket_bytes: int) -> AsyncIterator[Any]:
        self.sizes.append(bucket_bytes)
        weights = self._weights(version)
        for index, (name, tensor) in enumerate(weights.items()):
            data = np.frombuffer(tensor.tobytes(), np.uint8)
            await asyncio.sleep(0)
            yield Bucket(
                version=version,
                index=index,
                last=index == len(weights) - 1,
                names=[name],
                dtypes=["float32"],
                shapes=[tensor.shape],
                data=data,
                checksum=xxhash.xxh3_64_hexdigest(tensor.tobytes()),
            )

    async def send(self, version: int, engines: Sequence[EngineEndpoint]) -> Sequence[SentReport]:
        assert self.sender is not None, "the transport uses a sender, but its driver builds none"

        def export(*, all_ranks: bool) -> Iterator[Mapping[str, Tensor] | None]:
            for name, tensor in self._weights(version).items():
                yield {name: torch.from_numpy(tensor.copy())}

        return [await asyncio.to_thread(self.sender.send, export, version, engines)]


class Engines:
    """`slime_core.contracts.transport.EngineGroup`."""

    def __init__(self, *engines: ScriptedEngine) -> None:
        self.engines = engines

    @property
    def num_engines(self) -> int:
        return len(self.engines)

    async def call_all(self, method: str, *args: Any) -> Sequence[Any]:
        return await asyncio.gather(*(getattr(engine, method)(*args) for engine in self.engines))


def push(case: Case, engines: Engines, *versions: int, exporter: Exporter | None = None) -> list[WeightUpdateReport]:
    trainers = exporter or Exporter()

    async def scene() -> list[WeightUpdateReport]:
        transport: WeightTransport = case.build()
        try:
            return [await transport.push(trainers, engines, version) for version in versions]
        finally:
            await transport.close()

    with sending(case, engines, trainers):
        return run(scene())


@contextmanager
def sending(case: Case, engines: Engines, trainers: Exporter) -> Iterator[None]:
    """The trainer's rank has a sender, if the transport has senders, and the engines partners that it reaches."""
    with ExitStack() as stack:
        trainers.sender = case.driver.build_sender(case.config)
        if trainers.sender is not None:
            stack.callback(trainers.sender.close)
            example = require_example(case)
            for index, engine in enumerate(engines.engines):
                url = stack.enter_context(example.mock_server(engine.receive))
                engine.served_at = ((example.endpoint or EngineEndpoint)(index=index, url=url, incarnation=url),)
            folder = Path(stack.enter_context(TemporaryDirectory()))
            setup = SenderSetup(rank=0, world_size=1, device="cpu", model_path=folder, run_dir=folder, colocated=True)
            if case.driver.sends_adapters:
                setup = replace(setup, adapter_config={"peft_type": "LORA", "r": 1})
            trainers.sender.setup(setup)
        yield


def require_example(case: Case) -> TransportExample:
    examples = [example for example in case.subject.examples if isinstance(example, TransportExample)]
    assert examples, "it has senders: its `examples` must give a TransportExample, whose mock_server they deliver to"
    return examples[0]


def checksums(engines: Engines) -> list[str]:
    return list(run(engines.call_all("checksum")))


def exported(version: int) -> str:
    return checksum_of({name: tensor.tobytes() for name, tensor in weights_of(version).items()})


def test_what_arrives_is_what_was_exported(case: Case) -> None:
    engines = Engines(ScriptedEngine(), ScriptedEngine())
    for version in (0, 1, 5):
        push(case, engines, version)
        assert checksums(engines) == [exported(version)] * 2, f"version {version} arrives as something else"
        assert run(engines.call_all("version")) == [version] * 2


def test_its_report_is_true(case: Case) -> None:
    exporter = Exporter()
    engine = ScriptedEngine()
    (report,) = push(case, Engines(engine, ScriptedEngine()), 3, exporter=exporter)
    assert (report.version, report.buckets) == (3, len(engine.buckets)), f"it reports {report}"
    assert report.bytes_sent >= 0
    assert report.seconds >= 0
    assert all(size > 0 for size in exporter.sizes), f"it asks for buckets of {exporter.sizes} bytes"


def test_sending_again_changes_nothing(case: Case) -> None:
    engines = Engines(ScriptedEngine())
    push(case, engines, 4)
    before = checksums(engines)
    push(case, engines, 4)
    assert checksums(engines) == before == [exported(4)]
    # One object for the whole run.
    push(case, engines, 5, 5, 6)
    assert checksums(engines) == [exported(6)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_refused_bucket_surfaces(case: Case) -> None:
    engine = ScriptedEngine()
    push(case, Engines(engine), 2)
    for refused in range(len(engine.buckets)):
        with pytest.raises(EngineError):
            push(case, Engines(ScriptedEngine(), ScriptedEngine(refuses=refused)), 2)


def test_an_engine_that_stays_behind_is_an_error(case: Case) -> None:
    with pytest.raises(EngineError):
        push(case, Engines(ScriptedEngine(), ScriptedEngine(stays_at=1)), 2)


def test_no_weights_are_an_error(case: Case) -> None:
    with pytest.raises(EngineError):
        push(case, Engines(ScriptedEngine()), 2, exporter=Exporter(empty=True))
