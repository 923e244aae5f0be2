"""`slime run` with a reward model behind an SGLang server of the run, which is killed on the way."""

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

pytestmark = pytest.mark.sglang

VANDAL = '''
"""Kills the server before the second step is rolled out."""
import os, signal
import psutil
from slime_core.plugin import hook


@hook
def rollout_start(event):
    if event.rollout_id == 1:
        (server,) = [
            child.pid
            for child in psutil.Process().children(recursive=True)
            if child.cmdline()[1:3] == ["-m", "slime_sglang.server.launch"]
        ]
        (event.run.run_dir / "killed").write_text(str(server))
        os.kill(server, signal.SIGKILL)
'''
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
engines.reward = {{ load = "{judge}", engine = "sglang" }}
"""


@pytest.fixture(scope="module")
def judge(tiny, tmp_path_factory):
    """A Qwen3 with a score head, and what it makes of texts by transformers."""
    folder = tmp_path_factory.mktemp("judge")
    torch.manual_seed(5)
    config = AutoConfig.from_pretrained(tiny, num_labels=1)
    config.pad_token_id = 0
    model = Qwen3ForSequenceClassification(config).eval()
    torch.nn.init.normal_(model.score.weight, std=1.0)
    model.save_pretrained(folder)
    for file in Path(tiny).glob("*token*"):
        shutil.copy(file, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)

    @torch.no_grad()
    def score(text):
        ids = torch.tensor([tokenizer.encode(text)])
        # One row alone: what is read is its last token, whichever it is.
        hidden = model.model(ids).last_hidden_state[0, -1]
        return float(model.score(hidden))

    return folder, score


def test_rewards_of_the_run_are_the_reward_models_scores(judge, tiny, tmp_path):
    folder, score = judge
    rows = [{"prompt": f"{a}+{b}="} for a in range(2) for b in range(4)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "run.toml").write_text(RUN.format(policy=tiny, judge=folder))
    (tmp_path / "vandal.py").write_text(VANDAL)
    command = [str(Path(sys.executable).with_name("slime")), "run", "run.toml", "--plugin", "vandal.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "judged"
    for step in range(2):
        table = pyarrow.parquet.read_table(run / f"rollouts/step_{step:06d}.parquet").to_pydict()
        assert len(table["reward"]) == 8
        raw = [raw or clean for raw, clean in zip(table["raw_response"], table["response"], strict=True)]
        texts = [prompt + response for prompt, response in zip(table["prompt"], raw, strict=True)]
        assert table["reward"] == pytest.approx([score(text) for text in texts], abs=1e-4)
        assert len(set(table["reward"])) > 4
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    lost, restarted = (next(e for e in events if e["event"] == f"engine_{what}") for what in ("lost", "restarted"))
    assert lost["engine"] == restarted["engine"] == 1, "the policy's engine is 0"
    assert restarted["pid"] != int((run / "killed").read_text())
