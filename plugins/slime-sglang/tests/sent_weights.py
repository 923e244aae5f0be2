"""Senders of one rank, and engines that keep the tensors they receive, without a model."""

import numpy as np
import torch
from weight_server import FakeServer, serve_partner

from slime_core.contracts.transport import SenderSetup
from slime_core.errors import EngineError
from slime_sglang.engine import SglangEngine

sglang_endpoint = SglangEngine.endpoint


def weights(seed, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.0.w": (5, 3), "a.0.bias": (7,), "a.1.w": (4, 4), "empty": (0, 2), "head": (9, 2)}
    found = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return found | {"a.0.scale": torch.randn(3, generator=generator)}


class Engine:
    """An endpoint with a fake server that keeps the tensors it receives."""

    def __init__(self, stack, index=0):
        self.tensors = {}
        self.versions = []
        self.refuse = None
        self.partner = FakeServer(self.receive)
        url = stack.enter_context(serve_partner(self.partner))
        self.endpoint = sglang_endpoint(index=index, url=url, incarnation="first")

    def receive(self, bucket):
        if self.refuse == bucket.index:
            raise EngineError("refused for the test")
        start = 0
        for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
            size = int(np.prod(shape)) * getattr(torch, dtype).itemsize
            self.tensors[name] = bucket.data[start : start + size].tobytes()
            start += size
        if bucket.last:
            self.versions.append(bucket.version)

    def holds(self, expected):
        return self.tensors == {
            n: t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for n, t in expected.items()
        }


class Ranks:
    """One rank with a sender."""

    def __init__(self, driver, run_dir, frozen=(), **options):
        settings = {"update_weight_buffer_size": 40, "update_weights_timeout": 10.0} | options
        self.sender = driver.build_sender(driver.Config(**settings))
        where = {"model_path": run_dir, "run_dir": run_dir, "frozen": frozenset(frozen)}
        self.sender.setup(SenderSetup(rank=0, world_size=1, device="cpu", colocated=True, **where))
        self.exhausted = False

    def send(self, tensors, version, *engines):
        self.exhausted = False

        def export(*, all_ranks):
            for name, tensor in tensors.items():
                yield {name: tensor}
            self.exhausted = True

        return self.sender.send(export, version, [engine.endpoint for engine in engines])
