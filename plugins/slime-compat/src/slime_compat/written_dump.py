"""Writes a small dump as upstream does, an example for the contract kit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def write_example(folder: Path, num_steps: int, num_groups: int, num_samples: int) -> None:
    """Writes steps whose responses have one or more tokens."""
    for step in range(num_steps):
        numbers = range(step * num_groups * num_samples, (step + 1) * num_groups * num_samples)
        samples = [example_sample(index, index // num_samples) for index in numbers]
        torch.save({"rollout_id": step, "samples": samples}, folder / f"{step}.pt")


def example_sample(index: int, group_index: int) -> dict[str, Any]:
    """The fields of one sample, with upstream's names."""
    length = 1 + index % 3
    return {
        "group_index": group_index,
        "index": index,
        "rollout_id": index,
        "prompt": f"{group_index}=",
        "tokens": [3, 4, *(5 + position for position in range(length))],
        "response": "x" * length,
        "response_length": length,
        "label": str(group_index),
        "reward": float(index % 2),
        "loss_mask": None,
        "weight_versions": ["0"],
        "rollout_log_probs": [-0.5] * length,
        "remove_sample": False,
        "status": "completed",
        "metadata": {},
        "spec_info": {"spec_accept_token_num": 0},
    }
