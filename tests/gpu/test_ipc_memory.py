"""The life of a bucket that the transport `ipc` lends by a CUDA handle: torch keeps it until its reader has released it, and
not every handle has a reader that can."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slime_core.contracts.transport import SenderSetup
from slime_sglang.receiver import SglangReceiver
from slime_transports.flattened_bucket import FlattenedBucket, flatten
from slime_transports.handles import DeviceMemory
from slime_transports.in_process_server import endpoint, serve
from slime_transports.ipc import Turn
from slime_transports.plugin import Ipc

pytestmark = pytest.mark.gpu

SIZE = 64 * 2**20
READER = """
import base64, pickle, sys
from torch.multiprocessing import reductions

rebuild = reductions.rebuild_cuda_tensor
# As SGLang does, which finds the device by its UUID: there is one.
reductions.rebuild_cuda_tensor = lambda *given: rebuild(*given[:6], 0, *given[7:])
held = pickle.loads(base64.b64decode(sys.stdin.readline()))
print(int(held["flattened_tensor"][0]), flush=True)
sys.stdin.readline()
del held
"""


def bucket() -> FlattenedBucket:
    return flatten([("a", torch.full((SIZE,), 7, dtype=torch.uint8, device="cuda"))], index=0, last=True)


def in_use() -> int:
    gc.collect()
    torch.cuda.ipc_collect()
    return torch.cuda.memory_allocated()


@pytest.fixture
def before() -> int:
    # Memory that the first handle of a process allocates is kept.
    DeviceMemory(bucket()).release()
    return in_use()


def test_a_handle_that_is_never_opened(before: int) -> None:
    memory = DeviceMemory(bucket())
    assert in_use() >= before + SIZE, "torch gives it back by itself: nothing has to be released"
    memory.release()
    memory.release()
    assert in_use() == before


@pytest.mark.parametrize("killed", [False, True])
def test_a_reader_that_ends(before: int, killed: bool) -> None:
    """A reader that is killed releases nothing."""
    memory = DeviceMemory(bucket())
    with subprocess.Popen(
        [sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        try:
            assert reader.stdin is not None
            assert reader.stdout is not None
            reader.stdin.write(memory.payload(SglangReceiver) + "\n")
            reader.stdin.flush()
            assert reader.stdout.readline() == "7\n"
            assert in_use() >= before + SIZE
            if not killed:
                reader.communicate(timeout=60)
                assert reader.returncode == 0
        finally:
            reader.kill()
    if killed:
        assert in_use() >= before + SIZE
        memory.release()
    assert in_use() == before


def test_a_weight_update_of_another_ranks_engine(before: int, tmp_path: Path) -> None:
    """The first of two ranks, while the second one's engine gets weights."""
    sender = Ipc.build_sender(Ipc.Config(update_weight_buffer_size=SIZE))
    where = {"model_path": tmp_path, "run_dir": tmp_path}
    setup = SenderSetup(rank=0, world_size=1, device="cuda", colocated=True, **where)
    sender.setup(setup)
    sender._place = replace(setup, world_size=2)
    sender.all_gather = lambda own: [own, Turn() if isinstance(own, Turn) else None]

    def export(*, all_ranks: bool) -> Iterator[Mapping[str, Tensor] | None]:
        for number in range(4):
            yield {f"layers.{number}.w": torch.ones(SIZE, dtype=torch.uint8, device="cuda")}

    try:
        with serve(lambda received: None) as url:
            assert sender.send(export, 1, [endpoint(index=1, url=url)]).buckets == 0
    finally:
        sender.close()
    assert in_use() == before
