"""Errors that a user sees: `slime` as a subprocess, against a server that misbehaves."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_sglang import FakeSglang

from slime_sglang.plugin import Sglang
from slime_transports.config import SentConfig
from slime_transports.plugin import Delta, Disk, Distributed, Ipc

SLIME = Path(sys.executable).with_name("slime")


@pytest.fixture(scope="module")
def run_file(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(2) for b in range(2)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "run.toml").write_text(
        f"""
name = "bad"
backend = "fsdp"
engine = "sglang"
reward = "math"
algo = "grpo"
model = {{ hf_checkpoint = "{tiny}" }}
data = {{ prompt_data = "train.jsonl", input_key = "prompt", label_key = "label" }}
rollout = {{ rollout_batch_size = 2, n_samples_per_prompt = 2, rollout_max_response_len = 4, max_retries = 0 }}
train = {{ num_rollout = 1, global_batch_size = 4, lr = 1e-4 }}
"""
    )
    return folder / "run.toml"


@pytest.fixture
def fake(tiny):
    """`fake(behave=..., **model_info)`: such a server, running."""
    servers = []

    def start(behave="well", **model_info):
        known = {"model_path": str(tiny), "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
        server = FakeSglang(known | model_info, behave=behave)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def slime(run_file, tmp_path, *flags, code):
    command = [str(SLIME), "run", str(run_file), "--runs-dir", str(tmp_path / "runs"), *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    stated = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == code, stated
    assert "Traceback" not in stated
    return stated


def external(server, tmp_path, token="tok", **more):
    (tmp_path / "token").write_text(token)
    given = {
        "external-engine-addrs": server.address,
        "external-engine-token-file": tmp_path / "token",
        "control-timeout": 10,
    }
    return [word for name, value in (given | more).items() for word in (f"--sglang-{name}", str(value))]


@pytest.mark.sglang
def test_a_misspelt_flag(run_file, tmp_path):
    stated = slime(run_file, tmp_path, "--sglang-mem-fraction-statc", "0.5", "--dry-run", code=2)
    assert "--sglang-mem-fraction-statc: unknown flag; close match: --sglang-mem-fraction-static" in stated


@pytest.mark.sglang
def test_a_flag_with_a_wrong_value(run_file, tmp_path):
    wrong = {"mem-fraction-static": "much", "schedule-policy": "lpn", "attention-backend": "nosuch"}
    flags = [word for name, value in wrong.items() for word in (f"--sglang-{name}", value)]
    stated = slime(run_file, tmp_path, *flags, "--sglang-data-parallel-size", "2", "--dry-run", code=2)
    assert 'engine.mem_fraction_static = "much"' in stated
    assert 'engine.schedule_policy = "lpn": not among the choices' in stated
    assert "close match: lpm" in stated
    assert 'engine.attention_backend = "nosuch"' in stated
    assert "torch_native" in stated
    assert "called dp_size here: pass --sglang-dp-size" in stated


@pytest.mark.sglang
def test_options_that_cannot_work_are_reported_before_the_start(run_file, tmp_path):
    flags = ["--use-rollout-routing-replay", "--sglang-router-policy", "cache_aware", "--sglang-servers", "2"]
    stated = slime(run_file, tmp_path, *flags, "--dry-run", code=2)
    assert "sglang-router does not forward the request for expert ids" in stated
    assert "Pass --rollout-num-gpus-per-engine 2 or a multiple" in stated


@pytest.mark.sglang
def test_a_flag_that_is_the_runs_own(run_file, tmp_path):
    flags = ["--sglang-model-path", "/elsewhere", "--sglang-context-length", "14"]
    stated = slime(run_file, tmp_path, *flags, "--dry-run", code=2)
    assert "engine.model_path" in stated
    assert "decided by model.hf_checkpoint" in stated
    assert "engine.context_length" in stated
    assert "rollout.rollout_max_context_len" in stated


BY_BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def test_which_quantized_weights_can_be_updated():
    server = SimpleNamespace(quantization=None)
    assert Sglang.push_problems(server, BY_BLOCK) == Sglang.push_problems(server, None) == []
    assert Sglang.push_problems(SimpleNamespace(quantization="fp8"), BY_BLOCK) == []
    (problem,) = Sglang.push_problems(SimpleNamespace(quantization="fp8"), None)
    assert 'engine.quantization = "fp8": SGLang quantizes weights when it starts, and takes no new ones' in problem
    assert "--rollout-load FOLDER with a folder that `slime convert MODEL FOLDER --to fp8` writes" in problem
    for other in ({"quant_method": "compressed-tensors"}, {"quant_method": "fp8"}):
        (problem,) = Sglang.push_problems(server, other)
        assert f"({other['quant_method']}), not in float8 by block" in problem
        assert "`slime convert MODEL FOLDER --to fp8`" in problem


def test_transports_with_quantized_weights():
    plain, checked = (SentConfig(check_weight_update_equal=equal) for equal in (False, True))
    for transport in (Ipc, Distributed, Disk):
        assert transport.push_problems(plain, None, BY_BLOCK) == transport.push_problems(checked, None, None) == []
        (problem,) = transport.push_problems(checked, None, BY_BLOCK)
        assert "sync.check_weight_update_equal = true: the engines' weights are quantized" in problem
    assert Delta.push_problems(plain, None, None) == []
    (problem,) = Delta.push_problems(plain, None, BY_BLOCK)
    assert 'sync.transport = "delta": the engines\' weights are quantized' in problem


@pytest.mark.sglang
def test_another_token(run_file, tmp_path, fake):
    flags = external(fake(), tmp_path, token="other")
    # By the name that it has elsewhere.
    flags[flags.index("--sglang-external-engine-addrs")] = "--rollout-external-engine-addrs"
    stated = slime(run_file, tmp_path, *flags, code=5)
    assert "refuses the token" in stated
    assert "engine.external_engine_token_file" in stated


@pytest.mark.sglang
def test_another_model(run_file, tmp_path, fake):
    stated = slime(
        run_file, tmp_path, *external(fake(model_type="llama", model_path="/models/llama"), tmp_path), code=5
    )
    assert "another model than the run: model_type llama instead of qwen3" in stated


@pytest.mark.sglang
def test_no_server_there(run_file, tmp_path, fake):
    server = fake()
    server.shutdown()
    server.server_close()
    stated = slime(run_file, tmp_path, *external(server, tmp_path), code=5)
    assert f"http://{server.address}" in stated


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("behave", "words"),
    [
        ("returns garbage", "the response is not JSON: <html>bad gateway</html>"),
        ("returns another version", "its tokens have version 17, but the server was sent version 0"),
        ("keeps its version", "version 0 was loaded, but its servers report [-1]"),
    ],
)
def test_responses_that_cannot_be_right(run_file, tmp_path, fake, behave, words):
    stated = slime(run_file, tmp_path, *external(fake(behave), tmp_path), "--no-use-fault-tolerance", code=5)
    assert words in stated


@pytest.mark.sglang
def test_a_request_that_is_refused(run_file, tmp_path, fake):
    """No server is restarted for it."""
    stated = slime(run_file, tmp_path, *external(fake(400), tmp_path), code=5)
    assert "it refuses a request (status 400): Requested token count exceeds the context" in stated
    assert "restarted" not in stated


@pytest.mark.sglang
def test_a_server_that_hangs(run_file, tmp_path, fake):
    flags = external(fake("hangs"), tmp_path, **{"request-timeout": 2})
    stated = slime(run_file, tmp_path, *flags, "--no-use-fault-tolerance", code=5)
    assert "POST /generate got no response in 2 s" in stated
