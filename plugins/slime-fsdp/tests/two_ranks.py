"""Run as a script, once per rank: everything that needs two ranks, each part saved for the tests to look at.

usage: two_ranks.py RANK MODEL_FOLDER OUT_FOLDER
"""

import random
import sys
from pathlib import Path

import torch
from conftest import SGD, SequencePolicy, make_samples, pack, start, weights_of

from slime_core.errors import ModelError

RANK, MODEL, OUT = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])


def begin(name, options=None, optimizer=None, **setup):
    rendezvous = f"file://{OUT / name}.rendezvous"
    return start(MODEL, options, optimizer, rank=RANK, world_size=2, local_rank=RANK, rendezvous=rendezvous, **setup)


def keep(name, backend, **more):
    weights = weights_of(backend)
    assert bool(weights) == (RANK == 0)
    torch.save({"weights": weights, **more}, OUT / f"{name}.{RANK}.pt")


def numbers(report):
    return {"sums": dict(report.sums), "grad_norm": report.grad_norm, "skipped": report.skipped}


def data_parallel():
    samples = make_samples()
    backend = begin("dp", optimizer=SGD, copies={"reference": MODEL})
    # The last rank has one micro-batch less to do, and meets the other with an empty one.
    mine = [samples[:3], samples[3:5]] if RANK == 0 else [samples[5:], []]
    before = backend.score([pack(samples)], entropy=True)[0].log_probs
    report = backend.train_step([pack(part) for part in mine], SequencePolicy())
    after = backend.score([pack(samples)])[0].log_probs
    frozen = backend.score([pack(samples)], weights="reference")[0].log_probs
    keep("dp", backend, **numbers(report), before=before, after=after, frozen=frozen)
    backend.refresh_copy("reference")
    refreshed = backend.score([pack(samples)], weights="reference")[0].log_probs
    # NaN on one rank only: both skip.
    report = backend.train_step([pack(samples)], SequencePolicy(poison=float("nan") if RANK == 0 else 0.0))
    backend.save_hf(OUT / "hf")
    keep("skip", backend, **numbers(report), refreshed=refreshed)
    backend.close()


def sync_each():
    samples = make_samples()
    backend = begin("sync", {"sync_each_micro_batch": True, "gradient_checkpointing": True}, SGD)
    mine = [samples[:3], samples[3:5]] if RANK == 0 else [samples[5:], []]
    report = backend.train_step([pack(part) for part in mine], SequencePolicy())
    keep("sync", backend, **numbers(report))
    backend.close()


def context_parallel():
    samples = make_samples()
    backend = begin("cp", {"context_parallel_size": 2}, SGD)
    scores = backend.score([pack(samples), pack([])], entropy=True)[0]
    # One micro-batch has no response token on rank 1: a prompt of one token and a response of one.
    report = backend.train_step([pack(samples[:4]), pack(samples[4:]), pack([])], SequencePolicy())
    keep("cp", backend, **numbers(report), log_probs=scores.log_probs, entropy=scores.entropy, rows=scores.rows)
    backend.close()


def sliding_window(folder):
    backend = start(
        folder,
        {"context_parallel_size": 2},
        rank=RANK,
        world_size=2,
        local_rank=RANK,
        rendezvous=f"file://{OUT / 'window'}.rendezvous",
    )
    scores = backend.score([pack(make_samples())])[0]
    torch.save({"log_probs": scores.log_probs, "rows": scores.rows}, OUT / f"window.{RANK}.pt")
    backend.close()


def resume():
    """Two steps and two more; then from the checkpoint in the middle, after other random numbers were drawn."""
    samples = make_samples()
    mine = samples[:4] if RANK == 0 else samples[4:]
    backend = begin("resume")
    for _ in range(2):
        backend.train_step([pack(mine)], SequencePolicy())
    (OUT / "checkpoint").mkdir(exist_ok=True)
    backend.save(OUT / "checkpoint")
    drawn = (random.random(), torch.rand(()).item())
    for _ in range(2):
        backend.train_step([pack(mine)], SequencePolicy())
    keep("straight", backend)
    backend.load(OUT / "checkpoint")
    assert (random.random(), torch.rand(()).item()) == drawn
    keep("middle", backend)
    for _ in range(2):
        backend.train_step([pack(mine)], SequencePolicy())
    keep("resumed", backend)
    backend.close()


def broken_folder():
    broken = OUT / "broken"
    try:
        begin("broken", model_path=broken)
    except ModelError as error:
        (OUT / f"broken.{RANK}.txt").write_text(str(error))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    data_parallel()
    sync_each()
    context_parallel()
    sliding_window(Path(sys.argv[4]))
    resume()
    broken_folder()
