"""Starting servers: options, devices, and errors of one that does not start."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_setup import setup_for
from safetensors.torch import save_file

from slime_core.errors import EngineError
from slime_serving.connection import new_pool
from slime_serving.devices import devices_of
from slime_serving.server_process import ServerProcess
from slime_sglang import launching, server_group
from slime_sglang.launching import options_for, start_server
from slime_sglang.log_format import SGLANG_LOG
from slime_sglang.plugin import Sglang
from slime_sglang.server_args import OWNED
from slime_sglang.server_group import SglangServers

HERE = Path(__file__).parent


@pytest.fixture
def setup(tmp_path):
    return setup_for(tmp_path / "model", tmp_path)


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(launching, "MODULE", "fake_sglang")
    monkeypatch.setenv("PYTHONPATH", str(HERE))


async def start(setup, **options):
    pool = new_pool()
    try:
        started = await start_server(Sglang.Config(**options), setup, 0, pool)
        await started.process.stop()
        return started
    finally:
        await pool.close()


def test_options_that_the_run_decides_are_refused(setup):
    """Keys that are set for every server are refused as options, but for those that only have another default here."""
    defaults = {*launching.ON_CPU, "dtype", "log_level", "log_level_http", "max_total_tokens", "skip_tokenizer_init"}
    gpu = replace(setup, device="cuda", num_devices=2, num_nodes=2, rendezvous="a:1", offload=True, routed_experts=True)
    set_here = {*options_for(Sglang.Config(), setup, 0), *options_for(Sglang.Config(), gpu, 0)}
    set_here |= {
        *options_for(Sglang.Config(servers=2, prefill_servers=1, deterministic=True), replace(setup, num_devices=2), 0)
    }
    assert set_here - defaults - set(OWNED) == set()


class WithOptions(Sglang.Config):
    """With this option, whether SGLang is installed or not."""

    chunked_prefill_size: int | None = None
    cuda_graph_max_bs_decode: int | None = None
    disable_cuda_graph: bool | None = None
    max_running_requests: int | None = None
    min_free_slots_delay: int | None = None
    pp_size: int = 1
    speculative_algorithm: str | None = None


def test_servers_that_prefill_have_options_of_their_own(setup):
    config = WithOptions(servers=2, prefill_servers=1, prefill_options={"chunked_prefill_size": 64})
    prefill, decode = (options_for(config, replace(setup, num_devices=2), place) for place in (0, 1))
    assert (prefill["disaggregation_mode"], prefill["chunked_prefill_size"]) == ("prefill", 64)
    assert decode["disaggregation_mode"] == "decode"
    assert "chunked_prefill_size" not in decode


@pytest.mark.parametrize(
    ("in_flight", "options", "expected"),
    [
        (256, {}, None),
        (512, {}, 512),
        (1025, {"servers": 2}, 513),
        (4096, {}, 1024),
        (4096, {"servers": 4, "prefill_servers": 2}, 1024),
        (1024, {"max_running_requests": 300}, 300),
        (1024, {"cuda_graph_max_bs_decode": 64}, 64),
        (1024, {"disable_cuda_graph": True}, None),
    ],
)
def test_graphs_hold_a_servers_share_of_the_requests_in_flight(setup, in_flight, options, expected):
    gpu = replace(setup, device="cuda", num_devices=4, max_batch=in_flight)
    assert options_for(WithOptions(**options), gpu, 0).get("cuda_graph_max_bs_decode") == expected


@pytest.mark.parametrize(
    ("in_flight", "options", "expected"),
    [
        (256, {}, (256, 16)),
        (512, {}, (512, 32)),
        (31, {}, (None, None)),
        (256, {"max_running_requests": 300}, (300, None)),
        (256, {"min_free_slots_delay": 4}, (None, 4)),
        (256, {"pp_size": 2}, (None, None)),
        (256, {"servers": 2}, (None, None)),
        (256, {"speculative_algorithm": "NGRAM"}, (None, None)),
    ],
)
def test_prompts_are_admitted_together_where_requests_follow_one_by_one(setup, in_flight, options, expected):
    setup.model_path.mkdir()
    (setup.model_path / "config.json").write_text("{}")
    gpu = replace(setup, device="cuda", num_devices=2, max_batch=in_flight, refills=True)
    given = options_for(WithOptions(**options), gpu, 0)
    assert (given.get("max_running_requests"), given.get("min_free_slots_delay")) == expected


@pytest.mark.parametrize(
    ("config", "limited"),
    [
        ({"linear_num_value_heads": 4}, False),
        ({"text_config": {"linear_conv_kernel_dim": 4}}, False),
        ({"thinker_config": {"text_config": {"sliding_window": 1024}}}, False),
        ({"compress_ratios": [4]}, False),
        ({"text_config": None, "sliding_window": None}, True),
        ({"sliding_window": 32768, "use_sliding_window": False}, True),
    ],
)
def test_slots_that_take_memory_are_not_limited(setup, config, limited, tmp_path):
    """SGLang reserves memory for as many as there are slots."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    gpu = replace(setup, device="cuda", model_path=tmp_path, max_batch=256, refills=True)
    assert ("max_running_requests" in options_for(Sglang.Config(), gpu, 0)) == limited


@pytest.mark.parametrize("setting", [{"device": "cpu"}, {"refills": False}])
def test_prompts_are_admitted_as_they_come_elsewhere(setup, setting):
    gpu = replace(setup, **{"device": "cuda", "max_batch": 256, "refills": True} | setting)
    assert "min_free_slots_delay" not in options_for(Sglang.Config(), gpu, 0)


def test_an_adapter_has_matrices_for_layers_that_sglang_adapts(tmp_path):
    """Not for a router's gate, nor for experts."""
    names = ["embed_tokens", "layers.0.self_attn.q_proj", "layers.0.mlp.gate", "layers.0.mlp.shared_expert_gate"]
    names += ["layers.0.mlp.experts.0.up_proj", "layers.0.mlp.shared_expert.down_proj"]
    save_file({f"model.{name}.weight": torch.zeros(4, 4) for name in names}, tmp_path / "model.safetensors")
    assert launching.target_modules(tmp_path) == ["down_proj", "lm_head", "q_proj"]


def test_without_a_gpu_there_are_no_graphs(setup):
    assert "cuda_graph_max_bs_decode" not in options_for(Sglang.Config(), replace(setup, max_batch=1024), 0)


@pytest.mark.parametrize(
    ("setting", "options", "dropped"),
    [
        ({"weights_follow": True, "transport": "ipc"}, {}, True),
        ({"weights_follow": True, "transport": "ipc"}, {"sleep_level": 1}, False),
        ({"weights_follow": True, "transport": "delta"}, {}, False),
        ({"weights_follow": True, "transport": "frozen"}, {}, False),
        ({"weights_follow": True, "transport": "frozen"}, {"sleep_level": 2}, False),
        ({"weights_follow": False, "transport": "ipc"}, {}, False),
        ({"weights_follow": False, "transport": "ipc"}, {"sleep_level": 2}, True),
        ({"weights_follow": False, "transport": None}, {"sleep_level": 2}, False),
    ],
)
def test_weights_that_are_sent_after_every_sleep_are_not_kept(setup, setting, options, dropped):
    setup.model_path.mkdir()
    (setup.model_path / "config.json").write_text("{}")
    gpu = replace(setup, device="cuda", offload=True, **setting)
    found = options_for(Sglang.Config(**options), gpu, 0)
    assert (found["enable_memory_saver"], found["enable_weights_cpu_backup"]) == (True, not dropped)
    # A draft comes from a folder of its own, and no weight update sends it.
    with_draft = options_for(WithOptions(**options, speculative_algorithm="EAGLE"), gpu, 0)
    assert with_draft["enable_draft_weights_cpu_backup"]


def test_quantized_weights_are_kept(setup):
    setup.model_path.mkdir()
    (setup.model_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    gpu = replace(setup, device="cuda", offload=True, weights_follow=True, transport="ipc")
    assert options_for(Sglang.Config(), gpu, 0)["enable_weights_cpu_backup"]


def test_options(setup):
    options = options_for(Sglang.Config(), setup, 0)
    assert (options["device"], options["dtype"], options["attention_backend"]) == ("cpu", "float32", "torch_native")
    assert options["enable_deterministic_inference"]
    gpu = replace(setup, device="cuda", num_devices=4, seed=7)
    options = options_for(Sglang.Config(servers=2), gpu, 1)
    assert (options["tp_size"], options["dtype"], options["random_seed"]) == (2, "bfloat16", 8)
    assert not {"attention_backend", "enable_deterministic_inference", "disable_radix_cache"} & set(options)
    assert options_for(Sglang.Config(pause_mode="retract"), gpu, 0)["disable_radix_cache"]
    assert options_for(Sglang.Config(), replace(gpu, offload=True), 0)["enable_memory_saver"]
    assert "enable_memory_saver" not in {**options, **options_for(Sglang.Config(), replace(setup, offload=True), 0)}
    with pytest.raises(EngineError, match=r"the 4 device\(s\) of an engine cannot be shared equally"):
        options_for(Sglang.Config(servers=3), gpu, 0)


@pytest.mark.parametrize(
    ("visible", "index", "place", "expected"),
    [
        (None, 0, 0, ("0", "1")),
        (None, 1, 1, ("6", "7")),
        ("4,5,6,7", 3, 0, ("4", "5")),
        ("4,5,6,7", 3, 1, ("6", "7")),
        ("0,1,2,3,4,5,6,7", 1, 0, ("4", "5")),
    ],
)
def test_devices(setup, monkeypatch, visible, index, place, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices_of(replace(setup, first_device=index * 4, num_devices=4), place, 2) == expected


def test_too_few_devices(setup, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(EngineError, match="requires 2 GPUs"):
        devices_of(replace(setup, num_devices=2), 0, 1)


async def test_a_start(setup, fake):
    started = await start(setup)
    assert started.process.exit_code is not None
    log = setup.run_dir / "logs" / "sglang-0-0.log"
    assert log.stat().st_mode & 0o077 == 0, "the log may have the token in it"
    assert log.read_text().count("frozen") == 1, "what it has loaded is looked through for garbage at every push"
    assert started.connection.token not in Path(f"/proc/{os.getpid()}/cmdline").read_text()


async def test_a_server_that_was_begun_early_waits_for_its_start(setup, fake, monkeypatch):
    monkeypatch.setattr(server_group, "in_source", lambda target, folder: True)
    servers = SglangServers(Sglang.Config())
    await servers.prepare(setup)
    (begun,) = servers._begun.values()
    log = setup.run_dir / "logs" / "sglang-0-0.log"
    await asyncio.sleep(0.5)
    assert begun.process.exit_code is None
    assert "loading" not in log.read_text()
    await servers.start(setup)
    assert servers.pid == begun.process.pid
    assert log.read_text().count("loading") == 1
    (gates,) = servers._gates
    await servers.stop()
    assert (begun.process.exit_code, gates.exists()) == (-signal.SIGKILL, False)


async def test_a_server_that_was_begun_and_never_started_is_ended(setup, fake, monkeypatch):
    monkeypatch.setattr(server_group, "in_source", lambda target, folder: True)
    servers = SglangServers(Sglang.Config())
    await servers.prepare(setup)
    (begun,) = servers._begun.values()
    await servers.stop()
    assert begun.process.exit_code == -signal.SIGKILL


async def test_a_server_that_dies_at_its_start(setup, fake):
    with pytest.raises(EngineError, match=r"(?s)ended with exit code 1 at start.*no kernel image is available"):
        await start(replace(setup, model_path=Path("/dies")))


async def test_a_server_that_has_no_room_to_wake_up_names_the_options(setup, fake):
    """Its connection ends first, which alone would be the error of the call."""
    servers = SglangServers(Sglang.Config())
    try:
        await servers.start(replace(setup, model_path=Path("/starves")))
        assert await servers.post("/release_memory_occupation", {}) == [{"success": True, "message": ""}]
        with pytest.raises(EngineError) as caught:
            await servers.post("/resume_memory_occupation", {})
    finally:
        await servers.stop()
    headline, *log = str(caught.value).splitlines()
    assert "failed: the GPU had too little free memory for it to wake up beside the trainer. Lower " in headline
    assert "engine.mem_fraction_static (--sglang-mem-fraction-static), or leave launcher.offload_train on" in headline
    assert "was killed by SIGKILL" in headline
    assert any("func=resume" in line for line in log)


async def test_a_server_that_kills_itself_at_its_start(setup, fake):
    """The signal is its own and has no meaning; its logged error is reported. An earlier attempt wrote to the same log."""
    log = setup.run_dir / "logs" / "sglang-0-0.log"
    log.parent.mkdir()
    log.write_text("Scheduler hit an exception: Traceback (most recent call last):\nOSError: of an attempt before\n")
    with pytest.raises(EngineError) as caught:
        await start(replace(setup, model_path=Path("/kills")))
    headline = str(caught.value).splitlines()[0]
    assert "SGLang failed: ValueError: context_length is too long (it was killed by SIGKILL) at start" in headline
    assert "an attempt before" not in str(caught.value)


async def test_a_server_that_hangs_at_its_start(setup, fake, monkeypatch):
    class Spoken(ServerProcess):
        """Waits until the server has written its first line."""

        def __init__(self, *arguments, log, **named):
            super().__init__(*arguments, log=log, **named)
            first_line(log)

    monkeypatch.setattr(launching, "ServerProcess", Spoken)
    with pytest.raises(EngineError, match=r"(?s)has not responded in 2 s \(engine.start_timeout\).*loading /hangs"):
        await start(replace(setup, model_path=Path("/hangs")), start_timeout=2)


async def test_a_port_that_is_taken(setup, fake, monkeypatch):
    # The squatter does not respond.
    monkeypatch.setattr(launching, "RESPONSE_S", 0.5)
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        taken = squatter.getsockname()[1]
        free, ports = launching.held_port, iter([squatter.dup()])
        monkeypatch.setattr(launching, "held_port", lambda host="127.0.0.1": next(ports, None) or free())
        started = await start(setup)
    assert str(taken) not in started.connection.address
    # Always taken: the error reports it.
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        monkeypatch.setattr(launching, "held_port", lambda host="127.0.0.1": squatter.dup())
        with pytest.raises(EngineError, match=r"(?s)at start.*Address already in use"):
            await start(setup)


async def test_a_server_that_runs_on_without_its_port(setup, fake):
    """As SGLang does: it is not waited for until the time limit, and another port is tried."""
    with pytest.raises(EngineError, match=r"(?s)engine 0: SGLang cannot listen at start.*address already in use"):
        await start(replace(setup, model_path=Path("/squatted")), start_timeout=50)
    assert (setup.run_dir / "logs" / "sglang-0-0.log").read_text().count("loading /squatted") == 3


async def test_no_other_process_gets_the_port_of_a_server_that_starts(setup, fake, monkeypatch):
    class Raced(ServerProcess):
        """Another process tries to take both ports before the server listens."""

        def __init__(self, module, options, **named):
            for name in ("port", "nccl_port"):
                with socket.socket() as other, pytest.raises(OSError, match="in use"):
                    other.bind(("127.0.0.1", options[name]))
            super().__init__(module, options, **named)

    monkeypatch.setattr(launching, "ServerProcess", Raced)
    started = await start(setup)
    assert [port.fileno() for port in started.held] == [-1, -1], "they are released when it responds"


def test_a_server_ends_with_its_parent(setup):
    """Killed without warning, the parent leaves no server behind."""
    code = (
        "import asyncio, sys, time\n"
        "from pathlib import Path\n"
        "from slime_sglang.log_format import SGLANG_LOG\n"
        "from slime_serving.server_process import ServerProcess\n"
        "import os\n"
        f"log = Path({str(setup.run_dir / 'log')!r})\n"
        "process = ServerProcess('parented', {}, log=log, form=SGLANG_LOG, environment=os.environ)\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    (setup.run_dir / "parented.py").write_text(
        "import sys, time\n"
        "from slime_sglang.server.parent import die_with_parent\n"
        "from pathlib import Path\n"
        "sys.stdin.buffer.readline()\n"
        "die_with_parent()\n"
        "Path(__file__).with_name('bound').touch()\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(setup.run_dir)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    child = int(parent.stdout.readline())
    while not (setup.run_dir / "bound").exists():
        assert parent.poll() is None
        time.sleep(0.05)
    os.kill(child, 0)
    parent.kill()
    parent.wait()
    for _ in range(1200):
        time.sleep(0.05)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
                continue
        break
    else:
        os.kill(child, signal.SIGKILL)
        raise AssertionError("the server outlives its parent")


def test_a_server_that_ends_itself_has_its_own_exit_code(setup):
    """Though a thread of it waits for the parent's end."""
    (setup.run_dir / "ending.py").write_text(
        "import sys, time\n"
        "from slime_sglang.server.parent import die_with_parent\n"
        "sys.stdin.buffer.readline()\n"
        "die_with_parent()\n"
        "time.sleep(0.2)\n"
        "sys.exit('an option that is none')\n"
    )
    log = setup.run_dir / "log"
    environment = {**os.environ, "PYTHONPATH": str(setup.run_dir)}
    process = ServerProcess("ending", {}, log=log, form=SGLANG_LOG, environment=environment)
    process._process.wait(60)
    assert (process.ending, log.read_text()) == ("ended with exit code 1", "an option that is none\n")


async def test_the_watch_ends_requests(setup, fake, tiny):
    """A server that is killed: those who wait hear of it at once, with its log."""
    from slime_plugin_kit.tiny_serving import ask

    engine = Sglang.build(Sglang.Config())
    model_info = replace(setup, model_path=tiny)
    info = await engine.start(model_info)
    os.kill(info.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"killed by SIGKILL|failed"):
        await engine.generate([ask(0, [3, 4])])
    for _ in range(50):
        await asyncio.sleep(0.05)
        try:
            await engine.health()
        except EngineError as error:
            if "killed by SIGKILL" in str(error):
                break
    else:
        raise AssertionError("the engine is reported as healthy")
    await engine.stop()
    await engine.stop()


def first_line(log):
    deadline = time.monotonic() + 60
    while not (given := log.read_text()).endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return given
