"""`slime run` with the real SGLang: the demo learns though an engine is killed, and every transport carries a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

from slime_plugin_kit.listening_sockets import PLUGIN, beyond_loopback, listening_sockets

pytestmark = pytest.mark.sglang

REPOSITORY = Path(__file__).parents[3]
STEPS, PROMPTS, SAMPLES = 8, 64, 8

VANDAL = '''
"""Stops a server with SIGSTOP when step 1 begins, so that its requests get no response, and kills it soon after."""
import os, signal, threading, time
from pathlib import Path
import psutil
from slime_core.plugin import hook, reward

BACK = Path("{folder}/back")


@hook
def rollout_start(event):
    if event.rollout_id != 1:
        return
    children = psutil.Process().children(recursive=True)
    servers = [child.pid for child in children if child.cmdline()[1:3] == ["-m", "slime_sglang.server.launch"]]
    (event.run.run_dir / "servers").write_text(" ".join(map(str, servers)))
    os.kill(servers[0], signal.SIGSTOP)
    threading.Timer(0.5, os.kill, (servers[0], signal.SIGKILL)).start()


@hook
def engine_recovered(event):
    BACK.touch()


@reward("sum")
def sum_is_right(sample):
    """Step 6 does not end before the engine is back, so that it is seen to serve."""
    while sample.group_index >= {late} and not BACK.exists():
        time.sleep(0.1)
    return float(sample.response.split("\\\\boxed{{")[-1].split("}}")[0].strip() == sample.prompt.label.strip())
'''


def slime(*words, cwd, run, timeout=600):
    """`run`: its folder, whose events and logs are shown if it does not end."""
    command = [str(Path(sys.executable).with_name("slime")), "run", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False, env=environment
        )
    except subprocess.TimeoutExpired as late:
        files = [run / "events.jsonl", *sorted((run / "logs").glob("*.log"))]
        pytest.fail("\n".join([str(late)[-2000:], *(f"{file}:\n{file.read_text()[-5000:]}" for file in files)]))
    assert done.returncode == 0, done.stdout + done.stderr


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def flags(**values):
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def test_the_demo_learns_though_an_engine_is_killed(tmp_path):
    """Addition, by reinforcement, through Ray and two SGLang engines; weights go over gloo, from a sender in an actor."""
    (tmp_path / "vandal.py").write_text(VANDAL.format(folder=tmp_path, late=6 * PROMPTS))
    test_set = REPOSITORY / "examples" / "arithmetic" / "generated" / "test.jsonl"
    evaluation = f'eval.datasets={{greedy={{path="{test_set}@[0:100]",temperature=0.0,reward="math"}}}}'
    words = flags(
        engine="sglang",
        launcher="ray",
        rollout_num_gpus=2,
        transport="distributed",
        plugin=tmp_path / "vandal.py",
        reward="sum",
        reward_timeout=300,
        runs_dir=tmp_path / "runs",
        num_rollout=STEPS,
        rollout_batch_size=PROMPTS,
        eval_interval=STEPS,
        concurrency=512,
        sglang_start_timeout=240,
        sglang_request_timeout=120,
        sglang_control_timeout=60,
        update_weights_timeout=60,
        set=evaluation,
    )
    run = tmp_path / "runs" / "arithmetic"
    slime("examples/arithmetic/run.toml", *words, "--dump-rollouts", cwd=REPOSITORY, run=run)

    events = lines(run / "events.jsonl")
    lost, restarted, recovered = (
        next(event for event in events if event["event"] == f"engine_{what}")
        for what in ("lost", "restarted", "recovered")
    )
    before = [int(pid) for pid in (run / "servers").read_text().split()]
    assert len(before) == 2
    assert restarted["pid"] not in before
    assert lost["engine"] == restarted["engine"] == recovered["engine"]
    assert lost["redispatched"] > 0
    assert recovered["version"] >= 1
    trained = []
    for step in range(STEPS):
        table = pyarrow.parquet.read_table(run / f"rollouts/step_{step:06d}.parquet").to_pydict()
        trained += table["index"]
        assert all(tokens for tokens in table["tokens"])
    assert sorted(trained) == list(range(STEPS * PROMPTS * SAMPLES)), "a prompt was lost, or trained twice"

    greedy = [row["metrics"]["eval/greedy"] for row in lines(run / "metrics.jsonl") if "eval/greedy" in row["metrics"]]
    assert len(greedy) == 2
    assert greedy[1] >= greedy[0] + 0.05, f"accuracy went from {greedy[0]} to {greedy[1]}"


@pytest.mark.parametrize("transport", ["ipc", "distributed", "disk", "delta", "direct"])
def test_a_run_with_each_transport(transport, served, tiny, tmp_path):
    """Two steps on a server that runs: in every step the tokens are of the version that was just pushed."""
    carry(served, tiny, tmp_path, transport=transport)


def test_megatron_trains_on_responses_of_sglang(served, tiny, tmp_path):
    """And nothing of the run, with its server, can be reached from another machine."""
    (tmp_path / "listening.py").write_text(PLUGIN)
    chosen = {"backend": "megatron", "launcher": "ray", "tensor_model_parallel_size": 2, "plugin": "listening.py"}
    carry(served, tiny, tmp_path, transport="distributed", **chosen)
    assert beyond_loopback(tmp_path / "runs/carried/listening.txt") == []
    sockets = listening_sockets(served.pid)
    assert {own.process.split()[0] for own in sockets} >= {"sglang::scheduler"}
    assert [str(own) for own in sockets if not own.is_loopback] == []


def carry(served, tiny, tmp_path, **chosen):
    served.renew()
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(2) for b in range(4)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "run.toml").write_text(
        f"""
name = "carried"
backend = "fsdp"
reward = "math"
algo = {{ name = "grpo", get_mismatch_metrics = true }}
model = {{ hf_checkpoint = "{tiny}" }}
data = {{ prompt_data = "train.jsonl", input_key = "prompt", label_key = "label" }}
rollout = {{ rollout_batch_size = 4, n_samples_per_prompt = 2, rollout_max_response_len = 6, dump_rollouts = true }}
train = {{ num_rollout = 2, global_batch_size = 8, lr = 1e-2 }}
checkpoint = {{ save_hf = false }}
"""
    )
    options = served.options
    words = flags(
        engine="sglang",
        runs_dir=tmp_path / "runs",
        **chosen,
        sglang_external_engine_addrs=options["external_engine_addrs"][0],
        sglang_external_engine_token_file=options["external_engine_token_file"],
    )
    run = tmp_path / "runs" / "carried"
    slime("run.toml", *words, cwd=tmp_path, run=run, timeout=120)
    metrics = [row["metrics"] for row in lines(run / "metrics.jsonl") if row["axis"] == "rollout/step"]
    assert [row["rollout/staleness/max"] for row in metrics] == [0, 0]
    assert all(row["perf/update_weights_wire_bytes"] > 0 for row in metrics)
    # The engine's log-probs equal the trainer's: it holds the trainer's weights.
    steps = [row["metrics"] for row in lines(run / "metrics.jsonl") if row["axis"] == "train/step"]
    assert all(step["train/train_rollout_logprob_abs_diff"] < 1e-4 for step in steps)
    assert served.ask("/model_info")["weight_version"] == "2"
