"""A reward model on a vLLM server of the run, beside transformers. It starts a server of its own, for a minute, so it is run by
hand: pytest plugins/slime-vllm/tests/reward_model.py"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, Qwen3ForSequenceClassification
from vllm_setup import PYTHON

RUN = """
name = "judged"
backend = "fsdp"
engine = "local"
algo = "grpo"
reward = "served"
model = {{ hf_checkpoint = "{policy}" }}
data = {{ prompt_data = "train.jsonl", input_key = "prompt" }}
rollout = {{ rollout_batch_size = 4, n_samples_per_prompt = 2, rollout_max_response_len = 6, dump_rollouts = true }}
train = {{ num_rollout = 2, global_batch_size = 8 }}
checkpoint = {{ save_hf = false }}
engines.reward = {{ load = "{judge}", engine = {{ name = "vllm", python = "{python}" }} }}
"""


@pytest.fixture
def judge(model, tmp_path):
    """A Qwen3 with a score head, and what it makes of texts by transformers."""
    folder = tmp_path / "judge"
    torch.manual_seed(5)
    config = AutoConfig.from_pretrained(model, num_labels=1)
    config.pad_token_id = 0
    scorer = Qwen3ForSequenceClassification(config).eval()
    torch.nn.init.normal_(scorer.score.weight, std=1.0)
    scorer.save_pretrained(folder)
    for file in Path(model).glob("*token*"):
        shutil.copy(file, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def score(text):
        hidden = scorer.model(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0, -1]
        return float(scorer.score(hidden))

    return folder, score


def test_rewards_of_the_run_are_the_reward_models_scores(judge, model, tmp_path):
    folder, score = judge
    rows = [{"prompt": f"{a}+{b}="} for a in range(2) for b in range(4)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "run.toml").write_text(RUN.format(policy=model, judge=folder, python=PYTHON))
    command = [str(Path(sys.executable).with_name("slime")), "run", "run.toml"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    for step in range(2):
        table = pyarrow.parquet.read_table(tmp_path / f"runs/judged/rollouts/step_{step:06d}.parquet").to_pydict()
        raw = [raw or clean for raw, clean in zip(table["raw_response"], table["response"], strict=True)]
        texts = [prompt + response for prompt, response in zip(table["prompt"], raw, strict=True)]
        assert table["reward"] == pytest.approx([score(text) for text in texts], abs=1e-4)
        assert len(set(table["reward"])) > 4
