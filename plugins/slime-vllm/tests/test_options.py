"""Options of vLLM's servers, and what is wrong with some, as a user types them."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from carried_run import write_run
from pydantic import ValidationError
from vllm_setup import PYTHON, setup_for

from slime_core.cli.invocation import bind_invocation, parse_words
from slime_core.config.engine_checks import layout_of_policy
from slime_core.contracts.setup import EngineLayout
from slime_core.errors import EngineError
from slime_plugin_kit.tiny_model import SERVED, make_tiny_model
from slime_transports.plugin import Adapter, Disk
from slime_vllm.features import Features
from slime_vllm.generation import drafts_of
from slime_vllm.launching import options_for
from slime_vllm.option_checks import problems_of_layout, problems_of_options
from slime_vllm.plugin import Vllm
from slime_vllm.receiver import VllmReceiver
from slime_vllm.server_args import ServerOption, options_in

SOURCE = """
class Other:
    hidden: int = 1


class EngineArgs:
    model: str = ModelConfig.model
    max_num_seqs: int | None = None
    load: LoadConfig = get_field(ModelConfig, "load")
    _private: int = 0


class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
"""
CONFIG = '''
class ModelConfig:
    model: str = ""
    """Name or folder. It may be long."""
    load: str = ""
    """How it is
    loaded"""
'''


def test_options_are_read_from_source(tmp_path):
    for path, text in {"engine/arg_utils.py": SOURCE, "config/model.py": CONFIG}.items():
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)
    assert list(options_in(tmp_path)) == [
        ServerOption("model", "str", "Name or folder."),
        ServerOption("max_num_seqs", "int | None", ""),
        ServerOption("load", "LoadConfig", "How it is loaded."),
        ServerOption("enable_log_requests", "bool", ""),
    ]


def test_an_option_that_the_run_decides_is_refused():
    with pytest.raises(ValidationError, match=r"it is decided by the model's max_position_embeddings"):
        Vllm.Config(max_model_len=100)


def test_an_interpreter_without_vllm_is_a_problem(tmp_path):
    (problem,) = problems_of_options(Vllm.Config(python=sys.executable))
    assert problem.startswith(
        f"engine.python: {sys.executable}: vLLM is not installed there. Install vLLM in an environment"
    )
    (problem,) = problems_of_options(Vllm.Config(python=str(tmp_path / "none")))
    assert "cannot be run" in problem


def test_external_servers_take_no_options():
    config = Vllm.Config(external_engine_addrs=("a:1", "b:2", "c:3"), servers=2, max_num_seqs=5)
    first, second = problems_of_options(config)
    assert "names 3 servers, not a multiple of engine.servers = 2" in first
    assert "engine.max_num_seqs = 5: an option of a server that the run starts" in second


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ({"num_devices": 3}, "not a multiple of engine.servers x pipeline_parallel_size x data_parallel_size = 2"),
        ({"num_devices": 2, "num_nodes": 2}, "is on one machine, and this one would be on 2"),
        ({"num_devices": 2, "routed_experts": True}, "train.use_rollout_routing_replay"),
    ],
)
def test_what_does_not_fit_the_run_is_a_problem(layout, text):
    (problem,) = problems_of_layout(Vllm.Config(servers=2), EngineLayout(devices_flag="--here", **layout))
    assert text in problem


@pytest.mark.parametrize(
    ("options", "layout", "text"),
    [
        ({}, {"adapter_rank": 513}, "vLLM takes adapters of rank 512 at most, and this one has rank 513"),
        ({"sleep_level": 2}, {"adapter_rank": 4, "offload": True}, "no update sends them again. Set sleep_level = 1."),
        ({"pipeline_parallel_size": 2}, {"adapter_rank": 4, "num_devices": 2}, "engine.pipeline_parallel_size = 2, "),
    ],
)
def test_what_does_not_fit_an_adapter_is_a_problem(options, layout, text):
    layout = EngineLayout(devices_flag="--here", **({"num_devices": 1} | layout))
    (problem,) = problems_of_layout(Vllm.Config(**options), layout)
    assert text in problem
    assert problems_of_layout(Vllm.Config(**options), replace(layout, adapter_rank=0)) == []


def test_servers_have_room_for_the_adapter_that_the_run_trains(tmp_path):
    options = options_for(Vllm.Config(), setup_for(tmp_path, tmp_path, adapter_rank=9), 0)
    assert (options["enable_lora"], options["max_loras"], options["max_lora_rank"]) == (True, 1, 16)
    assert "enable_lora" not in options_for(Vllm.Config(), setup_for(tmp_path, tmp_path), 0)
    with pytest.raises(ValidationError, match=r'it is decided by engine\.max_adapters, or sync\.transport = "adapter"'):
        Vllm.Config(enable_lora=True)


@pytest.mark.parametrize(
    ("words", "rank"),
    [([], 4), (["--debug-rollout-only"], 0), (["--transport", "disk"], 0)],
    ids=["adapter", "no updates", "merged"],
)
def test_engines_expect_an_adapter_if_they_get_one(words, rank, tmp_path):
    """Without an update, no adapter of the name would be there."""
    write_run(tmp_path, make_tiny_model(tmp_path / "model", SERVED))
    given = ["--engine", "vllm", "--vllm-external-engine-addrs", "127.0.0.1:1", "--lora-rank", "4"]
    given += words if "--transport" in words else ["--transport", "adapter", *words]
    asked = parse_words([str(tmp_path / "run.toml"), *given], switches=(), options=(), command="run")
    run = bind_invocation(asked)
    assert (run.adapter_rank, layout_of_policy(run).adapter_rank) == (rank, rank)


def test_an_adapter_is_not_compared():
    (problem,) = Adapter.problems(Adapter.Config(check_weight_update_equal=True), None)
    assert "servers cannot name the parts of an adapter that they hold" in problem


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ([], 2, 'sync.transport = "adapter": backend "fsdp" as it is set trains no LoRA adapter. Set the rank of'),
        (["--lora-adapter-path", "other"], 3, "other/adapter_config.json cannot be read: FileNotFoundError"),
        (["--lora-rank", "4", "--rollout-load", "other"], 2, "so engines must have these. Leave rollout_load out"),
        (
            ["--lora-rank", "4", "--engine", "sglang"],
            2,
            'sync.transport = "adapter": engine "sglang" understands direct, ipc, ',
        ),
        (["--lora-rank", "600"], 2, "vLLM takes adapters of rank 512 at most"),
    ],
)
def test_a_run_that_cannot_send_its_adapter_is_refused(words, code, text, tmp_path):
    write_run(tmp_path, tmp_path)
    (tmp_path / "other").mkdir()
    command = [str(Path(sys.executable).with_name("slime")), "run", "run.toml", "--transport", "adapter"]
    command += ["--engine", "vllm", "--vllm-external-engine-addrs", "127.0.0.1:1"] * ("sglang" not in words) + words
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert text in " ".join((done.stdout + done.stderr).split())


def test_devices_are_shared_by_servers_stages_and_replicas(tmp_path):
    config = Vllm.Config(servers=2, pipeline_parallel_size=2, data_parallel_size=2)
    setup = setup_for(tmp_path, tmp_path, num_devices=16)
    options = options_for(config, setup, 1)
    assert (options["tensor_parallel_size"], options["pipeline_parallel_size"], options["seed"]) == (2, 2, 1)
    assert options["data_parallel_size"] == 2
    assert Features.of_options(options, setup).ranks == 8
    assert options["skip_tokenizer_init"]


def test_a_run_on_a_cpu_is_refused_before_it_starts(tmp_path):
    write_run(tmp_path, make_tiny_model(tmp_path / "model", SERVED))
    command = [str(Path(sys.executable).with_name("slime")), "run", "run.toml", "--device", "cpu"]
    command += ["--engine", "vllm", "--vllm-python", str(PYTHON), "--vllm-spec-method", "ngram"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "engine.spec_method: with drafts, vLLM for CPUs returns" in " ".join((done.stdout + done.stderr).split())
    assert not (tmp_path / "runs").exists()


def test_a_wrong_flag_names_the_nearest(tmp_path):
    (tmp_path / "run.toml").write_text('name = "a"')
    slime = str(Path(sys.executable).with_name("slime"))
    command = [slime, "run", "run.toml", "--engine", "vllm", "--vllm-max-num-sequences", "4"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--vllm-max-num-seqs" in done.stdout + done.stderr


def test_weights_are_quantized_by_vllm_alone():
    assert Vllm.push_problems(Vllm.Config(quantization="fp8"), None) == []
    (problem,) = Vllm.push_problems(Vllm.Config(quantization="awq"), None)
    assert 'engine.quantization = "awq": vLLM takes no new weights then. Set one of fp8, ' in problem
    (problem,) = Vllm.push_problems(Vllm.Config(), {"quant_method": "fp8"})
    assert "pass --vllm-quantization fp8" in problem


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"quantization": "fp8"}, 'engine.quantization = "fp8": vLLM for CPUs has no float8 kernels'),
        ({"enable_chunked_prefill": True}, "engine.enable_chunked_prefill: on a CPU, vLLM dies of a prompt that is"),
        ({"spec_method": "ngram"}, "engine.spec_method: with drafts, vLLM for CPUs returns log-probs that are not"),
    ],
)
async def test_what_is_wrong_on_a_cpu_is_refused(options, text, tmp_path):
    """When the run is bound, or where `--device auto` chooses one."""
    layout = EngineLayout(num_devices=1, devices_flag="--here", device="cpu")
    (problem,) = problems_of_layout(Vllm.Config(**options), layout)
    assert text in problem
    assert problems_of_layout(Vllm.Config(**options), replace(layout, device=None)) == []
    with pytest.raises(EngineError, match=re.escape(text)):
        await Vllm.build(Vllm.Config(**options)).start(setup_for(tmp_path, tmp_path))


@pytest.mark.parametrize(
    ("in_flight", "options", "expected"),
    [
        (256, {}, {}),
        (512, {}, {"max_num_seqs": 512}),
        (1000, {}, {"max_num_seqs": 1000, "max_cudagraph_capture_size": 1000}),
        (4096, {"servers": 2}, {"max_num_seqs": 2048, "max_cudagraph_capture_size": 1024}),
        (4096, {"data_parallel_size": 8}, {"max_num_seqs": 512}),
        (1000, {"enforce_eager": True}, {"max_num_seqs": 1000}),
        (1000, {"max_num_seqs": 64}, {"max_num_seqs": 64}),
        (1000, {"max_cudagraph_capture_size": 8}, {"max_num_seqs": 1000, "max_cudagraph_capture_size": 8}),
    ],
)
def test_batches_are_as_large_as_a_servers_share_of_the_requests_in_flight(in_flight, options, expected, tmp_path):
    setup = setup_for(tmp_path, tmp_path, device="cuda", max_batch=in_flight, num_devices=8)
    found = options_for(Vllm.Config(**options), setup, 0)
    assert {name: found[name] for name in ("max_num_seqs", "max_cudagraph_capture_size") if name in found} == expected


def test_options_of_servers_that_share_devices(tmp_path):
    gpu = setup_for(tmp_path, tmp_path, device="cuda", offload=True)
    options = options_for(Vllm.Config(pause_mode="in_place"), gpu, 0)
    assert (options["enable_sleep_mode"], options["enable_prefix_caching"]) == (True, False)
    assert "enable_sleep_mode" not in options_for(Vllm.Config(), setup_for(tmp_path, tmp_path, offload=True), 0)
    (problem,) = problems_of_layout(
        Vllm.Config(pause_mode="retract"), EngineLayout(num_devices=1, devices_flag="--here", offload=True)
    )
    assert 'engine.pause_mode = "retract", launcher.offload_rollout' in problem
    with pytest.raises(ValidationError, match="needs enable_prefix_caching = false"):
        Vllm.Config(pause_mode="in_place", enable_prefix_caching=True)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "start this server with --logprobs-mode processed_logprobs."),
        (
            {"max_loras": 0},
            "start this server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora, --max-loras 1, --max-",
        ),
        ({"max_lora_rank": 1}, "--max-lora-rank 2 or more."),
        ({"loads_adapters": False}, "with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ({"weight_transfer_backend": None}, '--weight-transfer-config \'{"backend": "slime"}\''),
        ({"enable_prefix_caching": True}, "--no-enable-prefix-caching"),
        ({"model": "other"}, "vocab_size 9 instead of 7"),
        ({"world_size": "two"}, "does not respond like vLLM with slime's extension"),
    ],
)
async def test_an_external_server_must_have_what_a_run_needs(changes, text, tmp_path):
    for name, size in (("own", 7), ("other", 9)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": size}))
    options = {
        "model": "own",
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": False,
        "enable_prefix_caching": False,
        "grammar_backend": "auto",
        "scheduling_policy": "fcfs",
        "weight_transfer_backend": "slime",
        "max_loras": 1,
        "max_lora_rank": 2,
        "loads_adapters": True,
    }

    class Server:
        name = "engine 0 (http://there)"

        async def post(self, path, body, *, timeout_s):
            given = options | changes
            return {"results": [given | {"model": str(tmp_path / given["model"])}]}

        async def get(self, path, *, timeout_s):
            return {"world_size": 2} | changes

    config = Vllm.Config(external_engine_addrs=("a:1",), pause_mode="in_place")
    setup = setup_for(tmp_path / "own", tmp_path, adapter_rank=2)
    with pytest.raises(EngineError, match=re.escape(text)):
        await Features.of_all([Server()], config, setup)
    changes.clear()
    found = await Features.of_all([Server()], config, setup)
    assert (found.guided_decoding, found.ranks) == (True, 2)


def test_counts_of_drafts():
    """Two steps, of which one accepted both of its drafts and the other one of two."""
    counts = {"num_spec_steps": 2, "num_draft_tokens": 4, "num_accepted_draft_tokens": 3, "mean_acceptance_length": 2.5}
    assert drafts_of(counts).metrics == {"spec_verify_ct": 2, "spec_accept_length": 2.5, "spec_accept_rate": 0.75}
    assert drafts_of({}).metrics == {}


@pytest.mark.parametrize("options", [{}, {"external_engine_addrs": ("host:1",)}, {"quantization": "fp8"}])
def test_weights_of_any_server_are_compared(options):
    """Also of one server alone, that the run did not start: it compares what it holds itself. SGLang's only report it."""
    layout = EngineLayout(num_engines=1, num_devices=1, devices_flag="--rollout-num-gpus")
    checked, engine = Disk.Config(check_weight_update_equal=True), Vllm.Config(**options)
    assert Disk.problems(checked, engine) == []
    assert Disk.layout_problems(checked, engine, layout) == []
    assert VllmReceiver.compares_sent == engine.compares_sent
