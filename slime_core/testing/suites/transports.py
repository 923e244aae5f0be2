"""Weight transports, between a trainer and two engines that follow a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
import xxhash

from slime_core.contracts.transport import EngineEndpoint, SentReport, WeightTransport
from slime_core.errors import EngineError
from slime_core.testing.case import Case
from slime_core.testing.event_loop import run
from slime_core.testing.scripted_engine import ScriptedEngine, checksum_of
from slime_core.types.report import PublishReport
from slime_core.types.weights import Bucket


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
    """`slime_core.contracts.transport.TrainerLink`: a tensor a bucket."""

    def __init__(self, *, empty: bool = False) -> None:
        self.sizes: list[int] = []
        self._empty = empty

    async def stream_weights(self, version: int, bucket_bytes: int) -> AsyncIterator[Any]:
        self.sizes.append(bucket_bytes)
        weights = {} if self._empty else weights_of(version)
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
        raise AssertionError("scripted engines have no endpoint that a sender could reach")


class Engines:
    """`slime_core.contracts.transport.EngineLink`."""

    def __init__(self, *engines: ScriptedEngine) -> None:
        self.engines = engines

    @property
    def num_engines(self) -> int:
        return len(self.engines)

    async def each(self, method: str, *args: Any) -> Sequence[Any]:
        return await asyncio.gather(*(getattr(engine, method)(*args) for engine in self.engines))


def push(case: Case, engines: Engines, *versions: int, exporter: Exporter | None = None) -> list[PublishReport]:
    async def scene() -> list[PublishReport]:
        transport: WeightTransport = case.build()
        try:
            return [await transport.push(exporter or Exporter(), engines, version) for version in versions]
        finally:
            await transport.close()

    return run(scene())


def checksums(engines: Engines) -> list[str]:
    return list(run(engines.each("checksum")))


def exported(version: int) -> str:
    return checksum_of({name: tensor.tobytes() for name, tensor in weights_of(version).items()})


def test_what_arrives_is_what_was_exported(case: Case) -> None:
    engines = Engines(ScriptedEngine(), ScriptedEngine())
    for version in (0, 1, 5):
        push(case, engines, version)
        assert checksums(engines) == [exported(version)] * 2, f"version {version} arrives as something else"
        assert run(engines.each("version")) == [version] * 2


def test_its_report_is_true(case: Case) -> None:
    exporter = Exporter()
    (report,) = push(case, Engines(ScriptedEngine(), ScriptedEngine()), 3, exporter=exporter)
    assert (report.version, report.buckets) == (3, len(weights_of(3))), f"it reports {report}"
    assert report.bytes_sent >= 0
    assert report.seconds >= 0
    assert all(size > 0 for size in exporter.sizes), f"it asks for buckets of {exporter.sizes} bytes"


def test_pushing_again_changes_nothing(case: Case) -> None:
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
    for refused in range(len(weights_of(0))):
        with pytest.raises(EngineError):
            push(case, Engines(ScriptedEngine(), ScriptedEngine(refuses=refused)), 2)


def test_an_engine_that_stays_behind_is_an_error(case: Case) -> None:
    with pytest.raises(EngineError):
        push(case, Engines(ScriptedEngine(), ScriptedEngine(stays_at=1)), 2)


def test_no_weights_are_an_error(case: Case) -> None:
    with pytest.raises(EngineError):
        push(case, Engines(ScriptedEngine()), 2, exporter=Exporter(empty=True))
