"""Writes a small rollout dump, an example of `replay` for the contract kit."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from slime_core.data.table import dump_file, write_groups
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SampleGroup, VersionSpan


def write_example(folder: Path, *, num_steps: int, num_groups: int, num_samples: int) -> None:
    """Writes steps whose responses have one or more tokens."""
    for step in range(num_steps):
        numbers = range(step * num_groups, (step + 1) * num_groups)
        write_groups(dump_file(folder, step), [example_group(number, num_samples) for number in numbers])


def example_group(number: int, num_samples: int) -> SampleGroup:
    prompt = Prompt(
        group_index=number, text=f"{number}=", token_ids=np.array([3, 4], np.int32), origin=f"a.jsonl:{number}"
    )
    samples = []
    for position in range(num_samples):
        index, length = number * num_samples + position, 1 + position
        samples.append(
            Sample(
                index=index,
                group_index=number,
                rollout_id=index,
                prompt=prompt,
                tokens=np.concatenate([prompt.token_ids, np.full(length, 5 + position, np.int32)]),
                prompt_length=len(prompt.token_ids),
                loss_mask=np.ones(length, np.uint8),
                rollout_log_probs=np.full(length, -0.5, np.float32),
                response="x" * length,
                spans=(VersionSpan(0, 0, length),),
                reward=float(position),
            )
        )
    return SampleGroup(prompt=prompt, samples=tuple(samples))
