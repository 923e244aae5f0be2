"""A run that is fed from dumps in upstream's format."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file

TRAINING = ("--num-rollout", "2", "--save-hf", "--save-interval", "none", "--kl-loss-coef", "0.1")


def written_as_upstream(file: Path, step: int, target: Path) -> None:
    samples = [
        {
            "group_index": row["group_index"],
            "index": row["index"],
            "rollout_id": row["rollout_id"],
            "prompt": row["prompt"],
            "tokens": row["tokens"],
            "response": row["raw_response"] or row["response"],
            "response_length": len(row["tokens"]) - row["prompt_length"],
            "label": json.loads(row["label"]),
            "reward": row["reward"],
            "loss_mask": torch.tensor(row["loss_mask"]),
            "rollout_log_probs": row["rollout_log_probs"],
            "remove_sample": row["remove_sample"],
            "status": row["status"],
            "metadata": {},
        }
        for row in pq.read_table(file).to_pylist()
    ]
    torch.save({"rollout_id": step, "samples": samples}, target / f"{step}.pt")


@pytest.mark.usefixtures("tiny_forks")
def test_it_trains_as_the_run_that_was_dumped(tiny):
    whole = tiny.run(*TRAINING, "--name", "whole", "--dump-rollouts")
    assert whole.code == 0, whole.err
    dumps = tiny.folder / "dumps"
    dumps.mkdir()
    files = sorted((tiny.runs / "whole" / "rollouts").glob("step_*.parquet"))
    assert len(files) == 2
    for step, file in enumerate(files):
        written_as_upstream(file, step, dumps)
    collector = (
        "--debug-train-only",
        "--rollout.collector",
        "compat_dump",
        "--rollout.collector.path",
        "dumps/{rollout_id}.pt",
    )
    fed = tiny.run(*TRAINING, "--name", "fed", *collector)
    assert fed.code == 0, fed.err
    expected, found = (load_file(tiny.runs / name / "hf" / "model.safetensors") for name in ("whole", "fed"))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)

    missing = tiny.run(*TRAINING[2:], "--num-rollout", "3", "--name", "more", *collector)
    assert missing.code != 0
    assert "2.pt: no such dump. In its folder there are: 0.pt, 1.pt." in missing.err
    assert "Traceback" not in missing.err
