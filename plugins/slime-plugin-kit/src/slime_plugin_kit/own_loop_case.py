"""A loop of one's own beside `slime run`, both with the engine that a test names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import load_file

REWARD: Final = '''
from slime_core.plugin import reward


@reward("odd")
def odd(sample):
    """The share of odd tokens, which differs from response to response."""
    return sum(int(token) % 2 for token in sample.tokens[-4:]) / 4
'''
RUN: Final = """
name = "whole"
backend = "fsdp"
reward = "odd"
plugin = ["odd.py"]
algo = { name = "grpo" }
data = { prompt_data = "train.jsonl", input_key = "prompt", label_key = "label" }
rollout = { rollout_batch_size = 4, n_samples_per_prompt = 2, rollout_max_response_len = 6 }
train = { num_rollout = 2, num_steps_per_rollout = 1, lr = 1e-3 }
checkpoint = { save_hf = false }
"""
CLOSE: Final = 1e-5


def require_own_loop_is_the_run(
    folder: Path, model: Path, prompts: list[str], overrides: Mapping[str, Any], renew: Callable[[], object]
) -> None:
    """Two steps of each: rewards, gradient norms and trained weights are equal within `CLOSE`. overrides: the engine, by dotted
    keys. renew: gives the engine's servers the weights of the model's folder again."""
    from slime_core import open_session

    rows = [json.dumps({"prompt": prompt, "label": "0"}) for prompt in prompts]
    (folder / "train.jsonl").write_text("\n".join(rows))
    (folder / "odd.py").write_text(REWARD)
    (folder / "run.toml").write_text(RUN + f'model = {{ hf_checkpoint = "{model}" }}\n')
    words = [word for key, value in overrides.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    command = [str(Path(sys.executable).with_name("slime")), "run", "run.toml", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    logged = [json.loads(line) for line in (folder / "runs/whole/metrics.jsonl").read_text().splitlines()]
    norms = [row["metrics"]["train/grad_norm"] for row in logged if row["axis"] == "train/step"]
    renew()
    found = []
    with open_session(folder / "run.toml", overrides={"name": "own", **overrides}) as session:
        for _ in range(2):
            batch = session.credit(session.score(session.sample()))
            session.forward_backward(batch)
            found.append(session.optim_step().grad_norm)
            session.update_weights()
        saved = session.save()
    assert min(norms) > 0
    np.testing.assert_allclose(found, norms, rtol=CLOSE)
    whole, own = weights_of(folder / "runs/whole/checkpoints/step_2"), weights_of(saved)
    assert whole.keys() == own.keys()
    for name, tensor in whole.items():
        np.testing.assert_allclose(own[name], tensor, atol=CLOSE, err_msg=name)


def weights_of(checkpoint: Path) -> dict[str, Any]:
    """Weights and optimizer state."""
    files = sorted((checkpoint / "trainer/actor/state").glob("*.safetensors"))
    assert files, sorted(checkpoint.rglob("*"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
