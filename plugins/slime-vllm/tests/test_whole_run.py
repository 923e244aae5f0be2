"""`slime run --engine vllm` with two real servers of vLLM: three steps of several turns, by the flags that a user types."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

RUN = """
name = "carried"
backend = "fsdp"
reward = "math"
algo = {{ name = "grpo", get_mismatch_metrics = true }}
model = {{ hf_checkpoint = "{model}" }}
data = {{ prompt_data = "train.jsonl", input_key = "prompt", label_key = "label" }}
rollout = {{ rollout_batch_size = 4, n_samples_per_prompt = 2, rollout_max_response_len = 6, dump_rollouts = true }}
train = {{ num_rollout = 3, global_batch_size = 8, lr = 1e-2 }}
checkpoint = {{ save_hf = false }}
"""


def write_run(folder, model):
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(2) for b in range(4)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "run.toml").write_text(RUN.format(model=model))


TURNS = '''
"""Four turns. What a tool returns after each is another text for every sample."""
from dataclasses import replace
import numpy as np
from slime_core.plugin import generator


@generator("turns")
async def turns(episode):
    trajectory = episode.trajectory()
    for turn in range(4):
        if turn:
            drawn = np.random.default_rng([episode.prompt.group_index, trajectory.index, turn])
            trajectory.append_environment(drawn.integers(4, 20, 300, np.int32))
        exact = replace(episode.sampling, max_new_tokens=4, min_new_tokens=4)
        trajectory.append_completion(await episode.complete(trajectory.tokens, exact))
    return [trajectory.finish()]
'''
CACHED = 256 + 512
"""Tokens of a sample whose turns are all on one server: whole blocks of 128 tokens of the turn before. Before the second turn
there is none, before the third 310 tokens, before the last 610. Nothing else is cached: texts differ, new weights drop it."""


def test_the_samples_of_a_run_stay_on_the_server_that_has_their_prefix(served, model, tmp_path):
    write_run(tmp_path, model)
    (tmp_path / "turns.py").write_text(TURNS)
    words = ["--engine", "vllm", "--vllm-servers", "2", "--vllm-external-engine-addrs", ",".join(served.addresses)]
    words += [
        "--vllm-external-engine-token-file",
        str(served.token_file),
        "--plugin",
        "turns.py",
        "--generate",
        "turns",
    ]
    words += ["--rollout-max-response-len", "1000", "--transport", "ipc", "--check-weight-update-equal"]
    command = [str(Path(sys.executable).with_name("slime")), "run", "run.toml", *words]
    for address in served.addresses:
        served.ask("/update_weight_version", {"new_version": "default"}, address=address)
    before = [served.counted("prefix_cache_hits", address) for address in served.addresses]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    after = [served.counted("prefix_cache_hits", address) for address in served.addresses]
    logged = [json.loads(line) for line in (tmp_path / "runs/carried/metrics.jsonl").read_text().splitlines()]
    rollouts = [line["metrics"] for line in logged if line["axis"] == "rollout/step"]
    assert [row["rollout/staleness/max"] for row in rollouts] == [0, 0, 0]
    steps = [line["metrics"] for line in logged if line["axis"] == "train/step"]
    assert len(steps) == 3
    assert all(step["train/train_rollout_logprob_abs_diff"] < 1e-5 for step in steps)
    assert [served.ask("/weight_info", address=address)[1] for address in served.addresses] == [
        {"weight_version": "3"}
    ] * 2
    events = [json.loads(line) for line in (tmp_path / "runs/carried/events.jsonl").read_text().splitlines()]
    compared = [event["compared_with"] for event in events if event["event"] == "weights_compared"]
    assert compared == ["trainer"] * 4
    assert [event for event in events if event["event"] == "engine_lost"] == []
    # By the servers' own counts: each has the prefixes of the samples that it began, and both began some.
    hits = [now - then for now, then in zip(after, before, strict=True)]
    assert [count % CACHED for count in hits] == [0, 0]
    assert sum(hits) == 3 * 8 * CACHED
    assert min(hits) > 0
    assert [row["rollout/avg_cached_tokens_per_sample"] for row in rollouts] == [CACHED] * 3
