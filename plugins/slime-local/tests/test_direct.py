"""The transport, with real engines and with small ones that count."""

import asyncio

import local_oracle as oracle
import pytest

from slime_core.errors import EngineError
from slime_local.plugin import Direct


class Link:
    def __init__(self, engines):
        self.engines = engines

    @property
    def num_engines(self):
        return len(self.engines)

    async def call_all(self, method, *args):
        return await asyncio.gather(*(getattr(engine, method)(*args) for engine in self.engines))


class Trainers:
    def __init__(self, model, log=None, count=3):
        self.model, self.log, self.count = model, log if log is not None else [], count

    async def stream_weights(self, version, bucket_bytes):
        self.bucket_bytes = bucket_bytes
        for bucket in oracle.buckets(self.model, version, self.count):
            self.log.append(f"export {bucket.index}")
            yield bucket


class Counting:
    """An engine that takes a while to load, and reports its version."""

    def __init__(self, log, *, keeps=None, checksum="same", fails_at=None):
        self.log, self.keeps, self.sum, self.fails_at = log, keeps, checksum, fails_at
        self.held = -1

    async def load_bucket(self, bucket):
        self.log.append(f"load {bucket.index}")
        for _ in range(5):
            await asyncio.sleep(0)
        if bucket.index == self.fails_at:
            raise EngineError(f"engine 0: bucket {bucket.index} is damaged")
        self.log.append(f"loaded {bucket.index}")
        self.held = bucket.version

    async def version(self):
        return self.held if self.keeps is None else self.keeps

    async def checksum(self):
        return self.sum


async def test_push_to_engines(engines, qwen3):
    two = [await engines(qwen3, index=index) for index in range(2)]
    model = oracle.other_weights(qwen3, 1)
    trainers = Trainers(model)
    transport = Direct.build(Direct.Config(update_weight_buffer_size=4096, check_weight_update_equal=True))
    for _ in range(2):
        report = await transport.push(trainers, Link(two), 3)
        assert trainers.bucket_bytes == 4096
        assert (report.version, report.buckets) == (3, 3)
        assert report.bytes_sent == 4 * sum(p.numel() for p in model.parameters())
        assert [await engine.version() for engine in two] == [3, 3]
    sums = {await engine.checksum() for engine in two}
    assert len(sums) == 1
    await transport.close()


async def test_export_overlaps_loading(qwen3):
    log = []
    transport = Direct.build(Direct.Config())
    await transport.push(Trainers(oracle.plain_model(qwen3), log), Link([Counting(log)]), 0)
    for index in (0, 1):
        assert log.index(f"export {index + 1}") < log.index(f"loaded {index}") < log.index(f"load {index + 1}")
    assert log.index("loaded 0") < log.index("export 2")


async def test_differences_are_named(qwen3):
    trainers = Trainers(oracle.plain_model(qwen3))
    with pytest.raises(EngineError, match="pushed version 5, but engine 1 has 4"):
        await Direct.build(Direct.Config()).push(trainers, Link([Counting([]), Counting([], keeps=4)]), 5)
    pair = Link([Counting([]), Counting([], checksum="other")])
    await Direct.build(Direct.Config()).push(trainers, pair, 5)
    with pytest.raises(EngineError, match=r"differ between engines .*engine 1: other"):
        await Direct.build(Direct.Config(check_weight_update_equal=True)).push(trainers, pair, 5)
    with pytest.raises(EngineError, match="no weights"):
        await Direct.build(Direct.Config()).push(Trainers(oracle.plain_model(qwen3), count=0), pair, 5)


async def test_a_refused_bucket_ends_the_push(qwen3):
    log = []
    trainers = Trainers(oracle.plain_model(qwen3), log, count=5)
    with pytest.raises(EngineError, match="bucket 1 is damaged"):
        await Direct.build(Direct.Config()).push(trainers, Link([Counting(log, fails_at=1)]), 0)
    assert "load 2" not in log
    assert "export 3" not in log


async def test_an_exporter_that_cannot_close_does_not_hide_why_the_push_ended(qwen3):
    class Unclosable(Trainers):
        async def stream_weights(self, version, bucket_bytes):
            try:
                async for bucket in super().stream_weights(version, bucket_bytes):
                    yield bucket
            finally:
                raise OSError("the exporter's file is gone")

    trainers = Unclosable(oracle.plain_model(qwen3), count=5)
    with pytest.raises(EngineError, match="bucket 1 is damaged"):
        await Direct.build(Direct.Config()).push(trainers, Link([Counting([], fails_at=1)]), 0)
