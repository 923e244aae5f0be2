"""Run as a script, served by slime_plugin_kit.rank_server: one optimizer step of each case that it gets, over gloo.

The ranks of a case are forked after the imports, which take longer than all the rest. Each leaves `NAME/rank_R.pt` in the
folder `out`: its scores, what it reports, and, from the first rank, weights before and after.
"""

from __future__ import annotations

import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

from slime_core.contracts.optimizer import OptimizerConfig
from slime_core.contracts.setup import RoutingReplay
from slime_megatron.plugin import Megatron
from slime_plugin_kit.ranks_script import serve
from slime_plugin_kit.tiny_training import PROMPTS, Place, TrainingBatch, objective_of, opened

SGD = OptimizerConfig(optimizer="sgd", lr=1.0, weight_decay=0.0, clip_grad=0.0)
# A large epsilon: otherwise rounding reverses the direction of steps where a gradient is close to zero.
ADAM = OptimizerConfig(lr=0.01, clip_grad=0.5, adam_eps=1e-2)


# Large enough to change the choice of the routers.
LARGE_STEPS = OptimizerConfig(optimizer="sgd", lr=3.0, weight_decay=0.0, clip_grad=0.0)


def load_torch_dist(backend: Any, folder: Path) -> None:
    """Loads it in the way of another program with Megatron."""
    from megatron.core import dist_checkpointing

    from slime_megatron.checkpoint import model_state, put_model

    chunks = backend._trainer.bare
    put_model(chunks, dist_checkpointing.load(model_state(chunks), str(folder)))


def save_in_shards(backend: Any, folder: Path, shard_bytes: int) -> None:
    """Shards are so small that every rank writes one."""
    from slime_megatron import weights

    whole = weights.write_model
    weights.write_model = partial(whole, shard_bytes=shard_bytes)  # type: ignore[assignment]
    try:
        backend.save_hf(folder)
    finally:
        weights.write_model = whole


def with_expert_ids(training: TrainingBatch, layers: int, experts: int, top_k: int) -> TrainingBatch:
    """Adds random expert ids, as if an engine had returned them."""
    rng = np.random.default_rng(33)
    every = np.broadcast_to(np.arange(experts, dtype=np.uint8), (len(training.batch.tokens), layers, experts))
    ids = np.ascontiguousarray(rng.permuted(every, axis=-1)[..., :top_k])
    return replace(training, batch=replace(training.batch, routed_experts=ids))


def run_rank(rank: int, case: dict[str, Any], out: Path) -> None:
    place = Place(
        model=Path(case["model"]), rank=rank, world_size=case["world_size"], rendezvous=f"file://{out / 'rendezvous'}"
    )
    training = TrainingBatch.make()
    config = Megatron.Config(**case["options"])
    adam = case.get("adam", False)
    fields = {"optimizer": ADAM if adam else SGD}
    replay = RoutingReplay(case["replay"]) if "replay" in case else None
    if replay is not None:
        fields = {"optimizer": LARGE_STEPS, "routing_replay": replay}
    if replay is RoutingReplay.ROLLOUT:
        training = with_expert_ids(training, *case["sizes"])
    if "frozen" in case:
        fields["frozen_models"] = {"reference": Path(case["frozen"])}
    with opened(Megatron.build(config), place, **fields) as one:
        layout = one.layout
        if (folder := case.get("convert")) is not None:
            load_torch_dist(one.backend, Path(folder))
        mine = tuple(range(layout.dp_rank, len(PROMPTS), layout.dp_size))
        # Every rank has as many micro-batches, uneven, of which one is empty.
        split = (mine[:2], mine[2:], (), mine[:0]) if layout.dp_rank else (mine[:1], mine[1:3], mine[3:], ())
        # The recorded ids are replayed in other micro-batches.
        scores = one.scores(training, split[::-1] if replay else split, entropy=True)
        of_frozen = one.scores(training, split, weights="reference") if "frozen" in case else {}
        before = one.weights()
        reports = [
            one.backend.train_step(training.micros(split), objective_of()) for _ in range(2 if adam or replay else 1)
        ]
        if (shard_bytes := case.get("shard_bytes")) is not None:
            save_in_shards(one.backend, out / "hf", shard_bytes)
        if (folder := case.get("save")) is not None:
            Path(folder).mkdir(exist_ok=True)
            one.backend.save(Path(folder))
            staged = Path(f"{folder}-staged")
            staged.mkdir(exist_ok=True)
            write = one.backend.stage(staged)
        if (folder := case.get("load")) is not None:
            one.backend.load(Path(folder))
            # The layouts' batches are the same; only one more step is reported.
            reports = [one.backend.train_step(training.micros(split), objective_of())]
        state = {
            "layout": {"reports": layout.reports, "dp_rank": layout.dp_rank},
            "scores": {name: torch.from_numpy(column) for name, column in scores.items()},
            "frozen_scores": {name: torch.from_numpy(column) for name, column in of_frozen.items()},
            "sums": dict(reports[-1].sums),
            "grad_norm": reports[-1].grad_norm,
            "before": before,
            "after": one.weights(),
            "compiled": compiled_functions(),
        }
        if case.get("save") is not None:
            one.backend.train_step(training.micros(split), objective_of())
            state["next"] = one.weights()
            writing = ThreadPoolExecutor(1).submit(write)
            one.backend.train_step(training.micros(split), objective_of())
            writing.result()
        torch.save(state, out / f"rank_{rank}.pt")


def compiled_functions() -> list[str]:
    """Of Megatron's modules, those that are decorated with torch.compile."""
    found = []
    for module in [module for name, module in sys.modules.items() if name.startswith("megatron.core.")]:
        places = [module, *(value for value in vars(module).values() if isinstance(value, type))]
        found += [
            f"{module.__name__}.{name}"
            for place in places
            for name, value in vars(place).items()
            if isinstance(value, FunctionType)
            and value.__module__.startswith("megatron.")
            and hasattr(value, "_torchdynamo_orig_callable")
        ]
    return found


def run_cases(request: dict[str, Any]) -> None:
    start: Any = mp.start_processes
    for name, case in request["cases"].items():
        out = Path(request["out"]) / name
        out.mkdir()
        try:
            start(run_rank, (case, out), nprocs=case["world_size"], start_method="fork")
        except (mp.ProcessRaisedException, mp.ProcessExitedException):
            (out / "failure.txt").write_text(traceback.format_exc())


def main() -> None:
    torch.set_num_threads(1)
    # Built once here, so that its imports are done before the ranks are forked.
    Megatron.build(Megatron.Config())
    serve(run_cases)


if __name__ == "__main__":
    main()
