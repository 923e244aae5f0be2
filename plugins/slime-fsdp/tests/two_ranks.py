"""Run as a script: everything that requires two ranks; each part saves results for the tests. On the CPU the ranks are forked
after the imports, which take longer than all the rest; CUDA does not survive a fork.

usage: two_ranks.py DEVICE OUT_FOLDER MODEL_FOLDER SLIDING_WINDOW_FOLDER ADAPTER_FOLDER
"""

import errno
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing import start_processes

from conftest import SGD, SequencePolicy, make_samples, pack, pack_images, start, target_step, weights_of
from slime_core.contracts.optimizer import StepSettings
from slime_core.errors import ModelError, StorageError
from slime_fsdp import export
from slime_fsdp.gather import gathered
from slime_training import saved_model
from slime_training.adapters.shape import AdapterShape

ROUNDED = {
    "precision": "bfloat16",
    "main_params_dtype": "bf16",
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "bf16",
}
"""Weights and moments in bfloat16."""


@dataclass(frozen=True)
class Run:
    rank: int
    device: str
    out: Path
    model: Path
    sliding_window: Path
    adapter: Path

    def begin(self, name, options=None, optimizer=None, **setup):
        rendezvous = f"file://{self.out / name}.rendezvous"
        fields = {
            "rank": self.rank,
            "world_size": 2,
            "local_rank": self.rank,
            "rendezvous": rendezvous,
            "device": self.device,
        }
        # In float32 on GPUs too, unless asked otherwise: to be compared with one rank on the CPU.
        return start(self.model, {"precision": "float32"} | (options or {}), optimizer, **(fields | setup))

    def save(self, name, **what):
        plain = {
            key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for key, value in what.items()
        }
        torch.save(plain, self.out / f"{name}.{self.rank}.pt")

    def keep(self, name, backend, **more):
        weights = weights_of(backend)
        assert bool(weights) == (self.rank == 0)
        self.save(name, weights=weights, **more)


def numbers(report):
    return {"sums": dict(report.sums), "grad_norm": report.grad_norm, "skipped": report.skipped}


def uneven(device):
    """One rank has more rows than the other, or all of them."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"odd": (5, 3), "one": (1, 4), "even": (4, 2, 2), "vector": (7,)}
    whole = {name: torch.randn(shape, generator=draw).to(device) for name, shape in shapes.items()}
    return whole | {"double": whole["odd"].double()}


def save_in_shards(backend, run):
    """Shards are so small that both ranks write some; then with a disk that refuses those of the second rank. Saves the text of
    the error."""
    write_model, save_file = export.write_model, saved_model.save_file
    export.write_model = partial(write_model, shard_bytes=2**15)
    backend.save_hf(run.out / "hf_shards")
    if run.rank == 1:
        saved_model.save_file = refuse
    try:
        backend.save_hf(run.out / "hf_refused")
    except StorageError as error:
        return str(error)
    finally:
        export.write_model, saved_model.save_file = write_model, save_file


def refuse(tensors, file, **kwargs):
    raise OSError(errno.EDQUOT, "Disk quota exceeded")


def data_parallel(run):
    samples = make_samples()
    backend = run.begin("dp", optimizer=SGD, frozen_models={"reference": run.model})
    # The last rank has one micro-batch less, and computes an empty one instead.
    mine = [samples[:3], samples[3:5]] if run.rank == 0 else [samples[5:], []]
    before = backend.forward_only([pack(samples)], entropy=True)[0].log_probs
    report = backend.train_step([pack(part) for part in mine], SequencePolicy())
    after = backend.forward_only([pack(samples)])[0].log_probs
    frozen = backend.forward_only([pack(samples)], weights="reference")[0].log_probs
    run.keep("dp", backend, **numbers(report), before=before, after=after, frozen=frozen)
    backend.update_frozen_model("reference")
    refreshed = backend.forward_only([pack(samples)], weights="reference")[0].log_probs
    # NaN on one rank only: both skip.
    report = backend.train_step([pack(samples)], SequencePolicy(poison=float("nan") if run.rank == 0 else 0.0))
    backend.save_hf(run.out / "hf")
    run.keep("skip", backend, **numbers(report), refreshed=refreshed)
    run.save("shards", failure=save_in_shards(backend, run))
    mesh = init_device_mesh(run.device, (2,))
    one_rank_overflows(run)
    whole = uneven(run.device)
    cut = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    half = gathered(cut, torch.bfloat16, unchanged=("odd",))
    run.save("gathered", whole=whole, same=gathered(cut), half=half)
    backend.close()


def one_rank_overflows(run):
    backend = run.begin("overflow")
    before = backend.train_step([pack(make_samples())], SequencePolicy()).nonfinite
    if run.rank == 1:
        norm = backend._ready.model.model.model.norm.weight
        backend._ready.optimizer.state[norm]["exp_avg"].to_local()[-1] = float("inf")
    after = backend.train_step([pack(make_samples())], SequencePolicy()).nonfinite
    run.save("overflow", before=before, after=after)
    backend.close()


def sync_each(run):
    samples = make_samples()
    backend = run.begin("sync", {"sync_each_micro_batch": True, "gradient_checkpointing": True}, SGD)
    mine = [samples[:3], samples[3:5]] if run.rank == 0 else [samples[5:], []]
    report = backend.train_step([pack(part) for part in mine], SequencePolicy())
    run.keep("sync", backend, **numbers(report))
    backend.close()


def context_parallel(run):
    samples = make_samples()
    backend = run.begin("cp", {"context_parallel_size": 2}, SGD)
    scores = backend.forward_only([pack(samples), pack([])], entropy=True)[0]
    # One micro-batch has no response token on rank 1: a prompt of one token and a response of one.
    report = backend.train_step([pack(samples[:4]), pack(samples[4:]), pack([])], SequencePolicy())
    run.keep("cp", backend, **numbers(report), log_probs=scores.log_probs, entropy=scores.entropy, rows=scores.rows)
    backend.close()


def sliding_window(run):
    backend = run.begin("window", {"context_parallel_size": 2}, model_path=run.sliding_window)
    scores = backend.forward_only([pack(make_samples())])[0]
    run.save("window", log_probs=scores.log_probs, rows=scores.rows)
    backend.close()


def resume(run):
    """Two steps and two more; then again from the checkpoint in the middle, after other random numbers were drawn."""
    resume_with(run, "resume", {}, "")


def resume_rounded(run):
    resume_with(run, "resume_rounded", ROUNDED, "rounded_")


def resume_with(run, name, options, prefix):
    samples = make_samples()
    mine = samples[:4] if run.rank == 0 else samples[4:]
    folder = run.out / f"{prefix}checkpoint"
    backend = run.begin(name, options)
    reports = [backend.train_step([pack(mine)], SequencePolicy()) for _ in range(2)]
    folder.mkdir(exist_ok=True)
    backend.save(folder)
    staged = run.out / f"{prefix}staged"
    staged.mkdir(exist_ok=True)
    write = backend.stage(staged)
    drawn = (random.random(), torch.rand(()).item())
    backend.train_step([pack(mine)], SequencePolicy())
    writing = ThreadPoolExecutor(1).submit(write)
    backend.train_step([pack(mine)], SequencePolicy())
    writing.result()
    run.keep(f"{prefix}straight", backend, **numbers(reports[0]))
    # A forward leaves gathered weights, which a load must not write to instead of the sharded ones.
    backend.forward_only([pack(mine)])
    backend.load(folder)
    assert (random.random(), torch.rand(()).item()) == drawn
    run.keep(f"{prefix}middle", backend)
    for _ in range(2):
        backend.train_step([pack(mine)], SequencePolicy())
    run.keep(f"{prefix}resumed", backend)
    backend.close()


def value_head(run):
    value_head_with(run, "value", {}, "critic")


def value_head_rounded(run):
    value_head_with(run, "rounded_value", ROUNDED, "rounded_critic")


def value_head_with(run, name, options, folder):
    """The head has one row, so rank 1 has no part of it."""
    samples = make_samples()
    backend = run.begin(name, options, head="value")
    objective = SequencePolicy(reads_values=True)
    backend.train_step([pack(samples)], objective)
    (run.out / folder).mkdir(exist_ok=True)
    backend.save(run.out / folder)
    saved = backend.forward_only([pack(samples)])[0].values
    backend.train_step([pack(samples)], objective)
    trained = backend.forward_only([pack(samples)])[0].values
    backend.load(run.out / folder)
    loaded = backend.forward_only([pack(samples)])[0].values
    counts = [float(state["step"]) for state in backend._trainer.optimizer.state.values()]
    run.keep(name, backend, saved=saved, trained=trained, loaded=loaded, counts=counts)
    backend.close()


def float8(run):
    samples = make_samples()
    backend = run.begin("float8", {"fp8_recipe": "rowwise", "precision": "auto"}, SGD)
    mine = [samples[:3], samples[3:5]] if run.rank == 0 else [samples[5:], []]
    scores = backend.forward_only([pack(samples)])[0]
    report = backend.train_step([pack(part) for part in mine], SequencePolicy())
    run.keep("float8", backend, **numbers(report), log_probs=scores.log_probs)
    backend.close()


def adapters(run):
    """The reference is the folder that the adapters are trained on, `other` a copy with weights of its own."""
    samples = make_samples()
    own = run.out / "hf"
    options = {"lora_adapter_path": str(run.adapter)}
    backend = run.begin("lora", options, SGD, frozen_models={"reference": run.model, "other": own})
    mine = [samples[:3], samples[3:5]] if run.rank == 0 else [samples[5:], []]
    before = backend.forward_only([pack(samples)])[0].log_probs
    report = backend.train_step([pack(part) for part in mine], SequencePolicy())
    after = backend.forward_only([pack(samples)])[0].log_probs
    reference = backend.forward_only([pack(samples)], weights="reference")[0].log_probs
    again = backend.forward_only([pack(samples)])[0].log_probs
    for name in ("reference", "other"):
        backend.update_frozen_model(name)
    refreshed = backend.forward_only([pack(samples)], weights="reference")[0].log_probs
    other = backend.forward_only([pack(samples)], weights="other")[0].log_probs
    backend.save_hf(run.out / "lora_hf")
    sent = [layer or {} for layer in backend.export_adapter()]
    run.save("lora_adapter", layers=len(sent), adapter={name: part for layer in sent for name, part in layer.items()})
    (run.out / "lora_checkpoint").mkdir(exist_ok=True)
    backend.save(run.out / "lora_checkpoint")
    run.keep(
        "lora",
        backend,
        **numbers(report),
        before=before,
        after=after,
        reference=reference,
        again=again,
        refreshed=refreshed,
        other=other,
    )
    backend.train_step([pack(part) for part in mine], SequencePolicy())
    run.keep("lora_straight", backend)
    backend.load(run.out / "lora_checkpoint")
    backend.train_step([pack(part) for part in mine], SequencePolicy())
    run.keep("lora_resumed", backend)
    backend.close()


def held_adapters(run):
    """Two over one base, alone and together; rank 1 has a micro-batch less, and computes an empty one instead. `reference` is
    the base."""
    samples = make_samples()
    mine = [samples[:3], samples[3:5]] if run.rank == 0 else [samples[5:], []]
    shapes = {"a": AdapterShape(rank=3, alpha=6), "b": AdapterShape(rank=2, mlp=False)}
    options = {"max_adapters": 2}

    def step(backend, name):
        backend.use_adapter(name)
        backend.forward_backward([pack(part) for part in mine], SequencePolicy())
        return backend.optim_step(StepSettings(lr=0.02, clip_grad=0.3))

    for name in shapes:
        backend = run.begin(f"held_{name}", options)
        backend.add_adapter(name, shapes[name], 7)
        reports = [step(backend, name) for _ in range(2)]
        backend.save_adapter(name, run.out / f"held_{name}_alone", True)
        run.save(f"held_{name}", **numbers(reports[1]), log_probs=backend.forward_only([pack(samples)])[0].log_probs)
        backend.close()
    backend = run.begin("held", options, frozen_models={"reference": run.model})
    base = backend.forward_only([pack(samples)])[0].log_probs
    for name, shape in shapes.items():
        backend.add_adapter(name, shape, 7)
    for _ in range(2):
        for name in shapes:
            step(backend, name)
    for name in shapes:
        backend.save_adapter(name, run.out / f"held_{name}", True)
    reference = backend.forward_only([pack(samples)], weights="reference")[0].log_probs
    whole = sum(parameter.numel() for parameter in backend._ready.model.parameters())
    local = sum(parameter.to_local().numel() for parameter in backend._ready.model.parameters())
    try:
        backend.save_adapter("a", Path("/proc/nowhere/adapter"), False)
    except StorageError as error:
        failure = str(error)
    backend.remove_adapter("b")
    backend.load_adapter("c", run.out / "held_a", True)
    step(backend, "c")
    step(backend, "a")
    resumed = [backend._ready.adapters.held[name].low_rank.tensors() for name in "ac"]
    same = all(torch.equal(one, other) for one, other in zip(*(found.values() for found in resumed), strict=True))
    bucket = backend.export_adapter_of("a")
    assert (bucket is None) == (run.rank == 1)
    run.save("held", base=base, reference=reference, whole=whole, local=local, failure=failure, same=same)
    backend.close()


def held_adapters_elsewhere(run):
    """Over tokens that both ranks share, and over a bfloat16 base whose layers are recomputed."""
    samples = make_samples()
    backend = run.begin("held_cp", {"max_adapters": 1, "context_parallel_size": 2})
    backend.add_adapter("a", AdapterShape(rank=3, alpha=6), 7)
    backend.use_adapter("a")
    for _ in range(2):
        backend.forward_backward([pack(samples[:3]), pack(samples[3:5]), pack(samples[5:]), pack([])], SequencePolicy())
        report = backend.optim_step(StepSettings(lr=0.02, clip_grad=0.3))
    scores = backend.forward_only([pack(samples)])[0]
    run.save("held_cp", **numbers(report), log_probs=scores.log_probs, rows=scores.rows)
    backend.close()
    options = {"precision": "bfloat16", "max_adapters": 1, "gradient_checkpointing": True}
    backend = run.begin("held_half", options, model_path=run.out / "half")
    backend.add_adapter("a", AdapterShape(rank=3), 7)
    backend.use_adapter("a")
    reports = [backend.train_step([pack(samples)], SequencePolicy()) for _ in range(3)]
    bucket = backend.export_adapter_of("a")
    run.save(
        "held_half",
        losses=[report.sums["loss"] for report in reports],
        kept=[str(one.dtype) for one in backend._ready.adapters.held["a"].tensors() if one.ndim],
        sent=[] if bucket is None else list(bucket.dtypes),
    )
    backend.close()


def several_targets(run):
    backend = run.begin("targets", {"max_adapters": 1, "context_parallel_size": 2, "log_probs_chunk_size": 3})
    report, scores = target_step(backend)
    run.save("targets", **numbers(report), log_probs=scores.log_probs, entropy=scores.entropy, rows=scores.rows)
    backend.close()


def half_precision_adapters(run):
    """Adapters in float32 over a bfloat16 base, sharded together; the critic's head too."""
    samples = make_samples()
    for head in ("lm", "value"):
        backend = run.begin(
            f"lora_half_{head}",
            {"precision": "bfloat16", "lora_rank": 2, "reshard_after_forward": False},
            model_path=run.out / "half",
            head=head,
        )
        reports = [backend.train_step([pack(samples)], SequencePolicy(reads_values=head == "value")) for _ in range(3)]
        scores = backend.forward_only([pack(samples)])[0]
        backend.save_hf(run.out / f"lora_half_{head}_hf")
        run.keep(
            f"lora_half_{head}",
            backend,
            losses=[report.sums["loss"] for report in reports],
            scores=scores.log_probs if head == "lm" else scores.values,
        )
        backend.close()


def vision(run):
    """One rank has an image in its micro-batch, the other none: both gather the vision tower's shards."""
    folder = run.out / "vision"
    (micro,) = pack_images(folder, [5, 6, 1] if run.rank == 0 else [7])
    for name, options in (("vision", {}), ("vision_half", {"precision": "bfloat16", "gradient_checkpointing": True})):
        backend = run.begin(name, options, SGD, model_path=folder)
        scores = backend.forward_only([micro])[0]
        report = backend.train_step([micro], SequencePolicy())
        run.keep(name, backend, **numbers(report), log_probs=scores.log_probs)
        backend.close()


def vision_context_parallel(run):
    """Images are split over both ranks, and one micro-batch has none."""
    folder = run.out / "vision"
    micros = pack_images(folder, [5, 6, 1], [7])
    backend = run.begin("vision_cp", {"context_parallel_size": 2}, SGD, model_path=folder)
    scores = backend.forward_only(micros)
    report = backend.train_step(micros, SequencePolicy())
    columns = {f"{name}{n}": getattr(one, name) for n, one in enumerate(scores) for name in ("log_probs", "rows")}
    run.keep("vision_cp", backend, **numbers(report), **columns)
    backend.close()


def broken_folder(run):
    broken = run.out / "broken"
    try:
        run.begin("broken", model_path=broken)
    except ModelError as error:
        (run.out / f"broken.{run.rank}.txt").write_text(str(error))
    # The folder is read before the ranks join.
    assert not torch.distributed.is_initialized()


def half_precision(run):
    """The variable-length kernel under context parallelism, and lower precision under FSDP."""
    samples = make_samples()
    backend = run.begin("half", {"precision": "bfloat16", "context_parallel_size": 2}, SGD)
    scores = backend.forward_only([pack(samples)])[0]
    report = backend.train_step([pack(samples)], SequencePolicy())
    run.save("half", **numbers(report), log_probs=scores.log_probs, rows=scores.rows)
    backend.close()


def main(rank, device, *folders):
    run = Run(rank, device, *map(Path, folders))
    parts = (
        data_parallel,
        sync_each,
        context_parallel,
        sliding_window,
        resume,
        resume_rounded,
        value_head,
        value_head_rounded,
        half_precision,
        *([float8] if find_spec("torchao") else []),
        adapters,
        held_adapters,
        held_adapters_elsewhere,
        several_targets,
        half_precision_adapters,
        vision,
        vision_context_parallel,
        broken_folder,
    )
    for part in parts:
        part(run)


if __name__ == "__main__":
    method = "spawn" if sys.argv[1] == "cuda" else "fork"
    start_processes(main, tuple(sys.argv[1:]), nprocs=2, start_method=method)
