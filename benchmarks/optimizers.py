"""Seconds of an optimizer's step, and bytes of its state, for layers of a shape of Qwen3: each optimizer beside AdamW.

    python benchmarks/optimizers.py --shape 0.6B --layers 4
    python benchmarks/optimizers.py --shape 4B --layers 36 --device cuda

Gradients are random. The median of --steps steps after one that is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import torch

from slime_core import groups
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.optimizer import OptimizerConfig
from slime_core.registry import Registry, bind


@dataclass(frozen=True)
class Shape:
    hidden: int
    queries: int
    keys: int
    mlp: int

    def matrices(self) -> list[tuple[int, int]]:
        """Of one layer."""
        attention = [(self.queries, self.hidden), (self.keys, self.hidden), (self.keys, self.hidden)]
        return [*attention, (self.hidden, self.queries), *[(self.mlp, self.hidden)] * 2, (self.hidden, self.mlp)]


SHAPES = {"0.6B": Shape(1024, 2048, 1024, 3072), "4B": Shape(2560, 4096, 1024, 9728)}


def measured(name: str, shape: Shape, layers: int, device: str, steps: int) -> tuple[float, float, int]:
    """Seconds of a step, bytes of the state for each parameter, and bytes of a GPU that a step takes beside them."""
    resolved = Registry().resolve(groups.OPTIMIZERS, name, where="NAME")
    options: DriverConfig = bind(resolved, {}, where="NAME")
    draw = torch.Generator(device).manual_seed(0)
    weights = [torch.nn.Parameter(torch.zeros(s, device=device)) for _ in range(layers) for s in shape.matrices()]
    for weight in weights:
        weight.grad = torch.randn(weight.shape, device=device, generator=draw)
    group = {"params": weights, "weight_decay": 0.1, "hidden": True}
    optimizer = resolved.driver.build(options)([group], OptimizerConfig(optimizer=name, lr=1e-4))
    seconds = []
    for _ in range(1 + steps):
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated() if device == "cuda" else 0
        begin = time.perf_counter()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    state = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    beside = torch.cuda.max_memory_allocated() - held if device == "cuda" else 0
    return statistics.median(seconds[1:]), state / sum(weight.numel() for weight in weights), beside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["adam", "muon", "adamw_8bit"], metavar="NAME")
    parser.add_argument("--shape", choices=SHAPES, default="0.6B")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    for name in options.names:
        found = measured(name, SHAPES[options.shape], options.layers, options.device, options.steps)
        line = f"{name:<12} {found[0]:8.3f} s, {found[1]:5.2f} bytes of state per parameter"
        print(line + (f", {found[2] / 2**30:.2f} GiB beside it" if options.device == "cuda" else ""))


if __name__ == "__main__":
    main()
