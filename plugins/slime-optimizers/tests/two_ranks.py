"""Run as a script: two ranks, forked after the imports. Each saves its results for the tests.

usage: two_ranks.py OUT_FOLDER MODEL_FOLDER
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing import start_processes

from conftest import OPTIMIZERS, Stepped, Trained
from slime_plugin_kit.tiny_training import Place


def on_shards(name, rank, out):
    """Steps on given gradients."""
    dist.init_process_group("gloo", init_method=f"file://{out / name}.shards", rank=rank, world_size=2)
    stepped = Stepped(name, init_device_mesh("cpu", (2,)))
    stepped.step(0, 3)
    found = {"values": stepped.values(), "states": stepped.states()}
    dist.destroy_process_group()
    return found


def in_a_backend(name, rank, out, model):
    """Two steps, which are saved and loaded on the way."""
    folder = out / f"{name}_checkpoint"
    folder.mkdir(exist_ok=True)

    def begun(which):
        return Trained(name, Place(model=model, rank=rank, world_size=2, rendezvous=f"file://{out / name}.{which}"))

    straight = begun("straight")
    straight.train(2)
    straight.backend.save(folder)
    states = straight.backend._ready.optimizer.state.values()
    held = sum(value.to_local().nbytes for state in states for value in state.values() if value.ndim)
    found = {"after 2": straight.weights(), "bytes": held}
    straight.backend.sleep()
    straight.backend.wake_up()
    straight.train(2)
    found["after 4"] = straight.weights()
    straight.backend.close()
    resumed = begun("resumed")
    resumed.train(1)
    resumed.backend.load(folder)
    resumed.train(2)
    found["resumed"] = resumed.weights()
    resumed.backend.close()
    return found


def main(rank, out, model):
    for name in OPTIMIZERS:
        torch.save(on_shards(name, rank, Path(out)), Path(out) / f"{name}_shards.{rank}.pt")
        torch.save(in_a_backend(name, rank, Path(out), Path(model)), Path(out) / f"{name}_backend.{rank}.pt")


if __name__ == "__main__":
    start_processes(main, tuple(sys.argv[1:]), nprocs=2, start_method="fork")
