"""One of two trainer ranks, each with half of every tensor: `two_ranks.py RANK FOLDER`."""

import sys
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from sent_weights import Engine, weights

from slime_core.contracts.transport import SenderSetup
from slime_core.errors import EngineError
from slime_transports.plugin import Delta, Disk, Distributed, Ipc

rank, run_dir = int(sys.argv[1]), Path(sys.argv[2])
# No port, which another process might take before both have joined.
dist.init_process_group("gloo", init_method=f"file://{run_dir / 'rendezvous'}", rank=rank, world_size=2)


def exporter(seed):
    def export(*, all_ranks):
        for key, tensor in weights(seed).items():
            flat = tensor.float().flatten()
            mine = torch.zeros(flat.numel() + 1)
            half = flat.numel() // 2
            part = slice(0, half) if rank == 0 else slice(half, flat.numel())
            mine[part] = flat[part]
            dist.all_reduce(mine)
            whole = mine[:-1].view(tensor.shape).to(tensor.dtype)
            yield {key: whole} if all_ranks or rank == 0 else None

    return export


def play(driver, stack):
    sender = driver.build_sender(driver.Config(update_weight_buffer_size=40, update_weights_timeout=20))
    sender.setup(
        SenderSetup(rank=rank, world_size=2, device="cpu", model_path=run_dir, run_dir=run_dir, colocated=True)
    )
    stack.callback(sender.close)
    engine = Engine(stack)
    endpoints = [engine.endpoint]
    for version in (1, 2):
        report = sender.send(exporter(version), version, endpoints)
        assert (report.buckets > 2) == (rank == 0)
        assert rank or engine.holds(weights(version))
    engine.refuse = 0
    given = ""
    try:
        sender.send(exporter(3), 3, endpoints)
    except EngineError as error:
        given = str(error)
    assert "refused for the test" in given
    assert given.startswith("another trainer rank") == (rank == 1)
    engine.refuse = None
    sender.send(exporter(4), 4, endpoints)
    assert rank or engine.holds(weights(4))


for transport in (Ipc, Distributed, Disk, Delta):
    with ExitStack() as entered:
        play(transport, entered)
dist.destroy_process_group()
