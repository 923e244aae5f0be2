"""How long `slime view` takes to search, sort and open among many samples, and how much memory its server needs.

    python benchmarks/viewer.py --samples 1000000 --folder /tmp/many

It writes a run folder with as many samples of 1 kB (once; the folder is used again), starts `slime view` on it, and asks as the page
does: first without an index (cold), then, with a new server, with the one that the first left (warm).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from slime_core.data.table import dump_file, dumped_steps, write_groups
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SampleGroup, Status, VersionSpan

GROUPS = 128
SAMPLES = 8
WORDS = 170
"""About 1 kB."""
TOKENS = 250
VOCABULARY = 50_000
RARE = "quixotically"
"""In one response of ten thousand."""


def vocabulary(random: np.random.Generator, size: int = 20_000) -> list[str]:
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    weights = 1.0 / np.arange(2, 28)
    lengths = random.integers(1, 11, size)
    drawn = random.choice(letters, int(lengths.sum()), p=weights / weights.sum())
    ends = np.cumsum(lengths)
    return ["".join(drawn[end - length : end]) for length, end in zip(lengths, ends, strict=True)]


def write_run(folder: Path, num_samples: int) -> None:
    """Steps of 128 groups of 8. What is there already is left."""
    random = np.random.default_rng(0)
    words = vocabulary(random)
    weights = 1.0 / np.arange(5, len(words) + 5)
    weights /= weights.sum()
    rollouts = folder / "rollouts"
    rollouts.mkdir(parents=True, exist_ok=True)
    num_steps = -(-num_samples // (GROUPS * SAMPLES))
    there = set(dumped_steps(rollouts))
    for step in range(num_steps):
        if step not in there:
            write_groups(dump_file(rollouts, step), groups_of(step, words, weights))
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(num_steps):
            metrics = {"rollout/raw_reward": step / num_steps, "perf/step_time": 30.0, "perf/train_tokens": 3e5}
            line = {"axis": "rollout/step", "step": step, "rollout_id": step, "attempt": 1, "metrics": metrics}
            file.write(json.dumps(line) + "\n")
    manifest = {"config": {"name": "many", "train": {"num_rollout": num_steps}}, "plugins": {}, "libraries": {}}
    manifest |= {"trust_remote_code": False, "data": "", "fingerprint": ""}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def groups_of(step: int, words: list[str], weights: np.ndarray) -> list[SampleGroup]:
    random = np.random.default_rng(step)
    drawn = random.choice(len(words), (GROUPS * SAMPLES, WORDS), p=weights)
    tokens = random.integers(0, VOCABULARY, (GROUPS * SAMPLES, TOKENS)).astype(np.int32)
    log_probs = -random.exponential(0.5, (GROUPS * SAMPLES, TOKENS)).astype(np.float32)
    rewards = random.random(GROUPS * SAMPLES).round(3)
    groups = []
    for group in range(GROUPS):
        number = step * GROUPS + group
        prompt = Prompt(
            group_index=number,
            text=f"Question {number}: " + " ".join(words[word] for word in drawn[group * SAMPLES, :12]),
            token_ids=np.arange(16, dtype=np.int32),
            label=str(number),
            origin=f"questions.jsonl:{number}",
        )
        samples = []
        for row in range(group * SAMPLES, (group + 1) * SAMPLES):
            index = step * GROUPS * SAMPLES + row
            text = [words[word] for word in drawn[row]]
            if index % 10_000 == 77:
                text[90] = RARE
            samples.append(
                Sample(
                    index=index,
                    group_index=number,
                    rollout_id=index,
                    prompt=prompt,
                    tokens=np.concatenate([prompt.token_ids, tokens[row]]),
                    prompt_length=16,
                    loss_mask=np.ones(TOKENS, np.uint8),
                    rollout_log_probs=log_probs[row],
                    response=" ".join(text),
                    spans=(VersionSpan(step, 0, TOKENS),),
                    status=Status.TRUNCATED if rewards[row] < 0.05 else Status.COMPLETED,
                    reward=float(rewards[row]),
                    reward_parts={"format": float(rewards[row] > 0.5)},
                )
            )
        groups.append(SampleGroup(prompt=prompt, samples=tuple(samples)))
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, required=True, help="Made if it is not there.")
    asked = parser.parse_args()
    write_run(asked.folder, asked.samples)


if __name__ == "__main__":
    main()
