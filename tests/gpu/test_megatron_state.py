"""slime-megatron's optimizer state on one GPU: offloaded to the host, and with moments in bfloat16.

Needs megatron-core and slime-megatron: `pytest tests/gpu/test_megatron_state.py`. Each case is a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_plugin_kit.tiny_model import make_tiny_model
from slime_plugin_kit.tiny_training import ADAM, Place, TrainingBatch, objective_of, opened

pytestmark = pytest.mark.gpu
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "offloaded": {"optimizer_cpu_offload": True},
    "offloaded, overlapped": {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True},
    "moments": {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
}


def run(options: dict[str, Any], model: Path, folder: Path) -> None:
    """Takes steps with a checkpoint in the middle, written at once and in a thread, and a sleep; then again from both
    checkpoints."""
    from slime_megatron.plugin import Megatron

    training = TrainingBatch.make()
    state: dict[str, Any] = {}

    def step(one: Any, count: int) -> None:
        for _ in range(count):
            assert not one.backend.train_step(training.micros(), objective_of()).skipped

    def begin() -> Any:
        return opened(Megatron.build(Megatron.Config(**options)), Place(model=model), optimizer=ADAM, device="cuda")

    for name in ("first", "saved", "staged"):
        (folder / name).mkdir(parents=True)
    with begin() as one:
        one.backend.save(folder / "first")
        step(one, 2)
        one.backend.save(folder / "saved")
        write = one.backend.stage(folder / "staged")
        state["middle"] = one.weights()
        one.backend.sleep()
        one.backend.wake_up()
        step(one, 2)
        write()
        state["straight"] = one.weights()
        parts = one.backend._trainer.optimizer
        parts = getattr(parts, "chained_optimizers", [parts])
        kept = [v for part in parts for s in part.optimizer.state.values() for v in s.values() if v.ndim]
        state["devices"] = {tensor.device.type for tensor in kept}
        state["dtypes"] = {str(tensor.dtype) for tensor in kept}
    for name, steps in (("first", 4), ("saved", 2), ("staged", 2)):
        with begin() as one:
            step(one, 1)
            one.backend.load(folder / name)
            step(one, steps)
            state[f"from {name}"] = one.weights()
    torch.save(state, folder / "state.pt")


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    parent = tmp_path_factory.mktemp("megatron")
    model = make_tiny_model(parent / "model")
    found = {}
    for number, (name, options) in enumerate(CASES.items()):
        folder = parent / str(number)
        words = [sys.executable, "-W", "ignore", __file__, json.dumps(options), str(model), str(folder)]
        # pytest shows its output if a test fails.
        if subprocess.run(words, check=False, timeout=240).returncode == 0:
            found[name] = torch.load(folder / "state.pt", weights_only=True)
    return found


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([(one[name].float() - other[name].float()).norm() for name in one]).norm())


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_state_on_the_gpu_in_float32(states: dict[str, dict[str, Any]], name: str) -> None:
    assert name in states, "it failed; see above"
    plain = states["plain"]
    moved = distance(plain["straight"], plain["middle"])
    # bfloat16 forwards, exported in bfloat16.
    assert distance(states[name]["straight"], plain["straight"]) < 0.1 * moved
    assert states[name]["devices"] == ({"cpu"} if "offloaded" in name else {"cuda"})
    assert states[name]["dtypes"] == ({"torch.bfloat16"} if name == "moments" else {"torch.float32"})


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("checkpoint", ["first", "saved", "staged"])
def test_it_resumes_from_a_checkpoint(states: dict[str, dict[str, Any]], name: str, checkpoint: str) -> None:
    assert name in states, "it failed; see above"
    state = states[name]
    moved = distance(state["straight"], state["middle"])
    # Sums of attention on GPUs are not in a fixed order.
    assert distance(state[f"from {checkpoint}"], state["straight"]) < 0.05 * moved


if __name__ == "__main__":
    run(json.loads(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
