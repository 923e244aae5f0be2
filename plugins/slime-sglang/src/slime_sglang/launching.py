"""Options, environment and start of a server of the run."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from slime_core.contracts.setup import EngineSetup
from slime_core.data.model_folder import read_model_config, shapes_in
from slime_core.errors import EngineError
from slime_serving.adapter_options import linear_sizes
from slime_serving.devices import DEVICES, devices_of
from slime_serving.held_port import held_port, number_of
from slime_serving.image_tokens import ImageTokens
from slime_serving.listener import is_loopback
from slime_serving.server_group import Started
from slime_serving.server_process import ServerProcess, address_of
from slime_serving.start import RESPONSE_S, start_until_up
from slime_sglang.adapted_layers import ADAPTED
from slime_sglang.config import SglangOptions, options_of_role, role_of, server_options
from slime_sglang.connection import SglangConnection
from slime_sglang.log_format import SGLANG_LOG
from slime_sglang.option_checks import problem_of_devices
from slime_sglang.server.hook_table import (
    CHECKS,
    CPU_ADAPTERS,
    CPU_EXPERTS,
    CPU_SEEDS,
    DRAWS,
    FOLDERS,
    GATE,
    HEADS,
    ONE_ADDRESS,
)
from slime_training.rendezvous import GLOO_INTERFACE, interface_of

MODULE: Final = "slime_sglang.server.launch"
PACKAGES: Final = ("slime_sglang", "slime_transports", "slime_training", "slime_core")
"""What a server imports of slime. Of other packages it needs those that SGLang needs, and zstandard for deltas."""
OF_INTERPRETER: Final = frozenset({"PYTHONHOME", "VIRTUAL_ENV"})
"""Environment variables that are right for one interpreter."""

CHECKED_TRANSPORTS: Final = ("disk", "delta")
"""Transports whose weights are checked inside the server."""

GRAPHS: Final = "cuda_graph_max_bs_decode"
SETS_GRAPHS: Final = frozenset(
    {GRAPHS, "cuda_graph_bs_decode", "cuda_graph_config", "disable_cuda_graph", "disable_decode_cuda_graph"}
)
"""Options that set up to how many requests are decoded by a CUDA graph."""
LEAST_IN_GRAPHS: Final = 256
"""SGLang's own limit on GPUs of 80 GB and more, with less than four ranks."""
MOST_IN_GRAPHS: Final = 1024
"""A server decodes more requests without a graph: each size takes memory and time at the start."""

TOGETHER: Final = 16
"""Of a server whose slots are all in use, one in so many has to be free before it admits prompts. Each admission is a step of
its own between decode steps, of nearly the same time for one prompt as for sixteen."""
SETS_ADMISSION: Final = frozenset(
    {
        "min_free_slots_delay",
        "max_running_requests",
        "prefill_max_requests",
        "enable_mixed_chunk",
        "enable_prefill_delayer",
    }
)
"""Options that set when prompts are admitted."""

SEND_ALL: Final = ("direct", "ipc", "distributed", "disk")
"""Transports that send all weights in each update; a delta is applied to those that a server has."""

MARGIN: Final = 8
"""Tokens beyond the run's longest sequence: SGLang cuts responses a little before its context is full, without an error."""

ON_CPU: Final[Mapping[str, Any]] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,
    "mem_fraction_static": 0.3,
}
"""Options that SGLang needs on a CPU without its own kernels. An idle scheduler would use most of a core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangStarted(Started[SglangConnection]):
    bootstrap_port: int | None = None
    """Port of a prefill server to which decode servers connect."""


def options_for(config: SglangOptions, setup: EngineSetup, place: int) -> dict[str, Any]:
    """ServerArgs, without ports and token. Raises EngineError for devices that do not divide."""
    role = role_of(config, place)
    chosen = server_options(config) | options_of_role(config, role)
    on_cpu = setup.device == "cpu"
    pp_size = chosen.get("pp_size", 1)
    problem = problem_of_devices(config, setup.num_devices, setup.num_nodes, "--rollout-num-gpus-per-engine")
    if problem is not None:
        raise EngineError(f"engine {setup.index}: {problem}")
    deterministic = on_cpu if config.deterministic is None else config.deterministic
    options: dict[str, Any] = {
        "model_path": str(setup.model_path),
        "trust_remote_code": setup.trust_remote_code,
        "device": setup.device,
        "random_seed": setup.seed + place,
        "host": setup.host,
        "skip_server_warmup": True,
        "tp_size": setup.num_devices // config.servers // pp_size,
        # The trainers' compute dtypes on these devices, independent of the dtype of the folder.
        "dtype": "float32" if on_cpu else "bfloat16",
        "log_level": "info",
        "log_level_http": "warning",
    }
    if not setup.reward_model:
        options["context_length"] = setup.max_context_len + MARGIN
    if setup.num_nodes > 1:
        options |= {"nnodes": setup.num_nodes, "node_rank": setup.node_rank, "dist_init_addr": setup.rendezvous}
    if on_cpu:
        options |= {**ON_CPU, "max_total_tokens": tokens_in_flight(setup)}
        if ImageTokens.of(setup.model_path) is not None:
            # The fast one requires torchvision, which is a stub on a CPU.
            options["disable_fast_image_processor"] = True
    elif not SETS_GRAPHS & chosen.keys() and (graphs := sizes_in_graphs(config, setup, chosen)) > LEAST_IN_GRAPHS:
        options[GRAPHS] = graphs
    if setup.refills and not on_cpu and not SETS_ADMISSION & chosen.keys():
        options |= admission_options(config, setup, chosen)
    if deterministic:
        options["enable_deterministic_inference"] = True
    if setup.offload and not on_cpu:
        options |= sleep_options(config, setup, chosen)
    if setup.routed_experts:
        options["enable_return_routed_experts"] = True
    if config.most_adapters and not setup.reward_model:
        options |= adapter_options(config, setup) | ({"lora_backend": "torch_native"} if on_cpu else {})
    if config.pause_mode != "abort":
        options["disable_radix_cache"] = True
    if role is not None:
        options["disaggregation_mode"] = role
    if not (setup.model_path / "tokenizer_config.json").exists():
        options["skip_tokenizer_init"] = True
    return options | chosen


def admission_options(config: SglangOptions, setup: EngineSetup, chosen: Mapping[str, Any]) -> dict[str, int]:
    """Prompts are admitted together while all slots are in use. Not with several servers, whose shares differ by the router's
    choice, nor where other options divide the slots (SGLang refuses it with a pipeline), nor where slots take memory of their
    own: those of drafts, and `slots_take_memory`."""
    together = setup.max_batch // TOGETHER
    divided = config.servers > 1 or any(chosen.get(name, 1) > 1 for name in ("pp_size", "dp_size"))
    drafts = any(name.startswith("speculative_") for name in chosen)
    if together < 2 or divided or drafts or slots_take_memory(read_model_config(setup.model_path)):
        return {}
    return {"max_running_requests": setup.max_batch, "min_free_slots_delay": together}


def slots_take_memory(model: Mapping[str, Any]) -> bool:
    """Whether some layers keep more for a request than keys and values of its tokens: a state (linear attention, Mamba,
    convolutions, compressed keys), or a window, for which SGLang reserves memory by slots where prefixes are not shared."""
    windows = bool(model.get("sliding_window")) and model.get("use_sliding_window") is not False
    states = any(name.startswith(("linear_", "mamba_", "conv_", "ssm_", "compress_")) for name in model)
    return windows or states or any(slots_take_memory(part) for part in model.values() if isinstance(part, Mapping))


def adapter_options(config: SglangOptions, setup: EngineSetup) -> dict[str, Any]:
    # One is for requests without an adapter.
    places = config.adapter_places + 1
    return {
        "enable_lora": True,
        "max_loras_per_batch": places,
        "max_loaded_loras": max(config.most_adapters, places),
        "max_lora_rank": config.adapter_rank,
        "lora_target_modules": target_modules(setup.model_path),
    }


def sizes_in_graphs(config: SglangOptions, setup: EngineSetup, chosen: Mapping[str, Any]) -> int:
    """The largest batch that a server decodes by a CUDA graph: its share of the requests in flight."""
    decoding = config.servers - config.prefill_servers
    share = -(-setup.max_batch // decoding)
    return min(share, chosen.get("max_running_requests", share), MOST_IN_GRAPHS)


def sleep_options(config: SglangOptions, setup: EngineSetup, chosen: Mapping[str, Any]) -> dict[str, bool]:
    options = {"enable_memory_saver": True, "enable_weights_cpu_backup": not drops_weights(config, setup)}
    if any(name.startswith("speculative_") for name in chosen):
        # No weight update sends a draft's weights.
        options["enable_draft_weights_cpu_backup"] = True
    return options


def drops_weights(config: SglangOptions, setup: EngineSetup) -> bool:
    """Whether weights are dropped when the engine sleeps (`engine.sleep_level`), which is never done where no transport sends
    whole ones. Kept by default: quantized ones, since kernels keep tensors beside them that no weight update sends."""
    if config.external_engine_addrs or not setup.offload or setup.transport not in SEND_ALL:
        return False
    if config.sleep_level is not None:
        return config.sleep_level == 2
    if not setup.weights_follow or getattr(config, "quantization", None):
        return False
    return not read_model_config(setup.model_path).get("quantization_config")


def target_modules(model_path: Path) -> list[str]:
    """SGLang's lora_target_modules: the layers that an adapter may have matrices for, by the last part of their names."""
    return sorted({name.rpartition(".")[2] for name in linear_sizes(shapes_in(model_path))} & ADAPTED)


def hooks_for(setup: EngineSetup, options: Mapping[str, Any]) -> list[str]:
    """Names of the hooks that a server with these options needs."""
    on_cpu, deterministic = setup.device == "cpu", bool(options.get("enable_deterministic_inference"))
    generates = not setup.reward_model
    needed = {
        ONE_ADDRESS: True,
        CHECKS: generates,
        FOLDERS: setup.transport in CHECKED_TRANSPORTS,
        HEADS: True,
        DRAWS: generates and deterministic,
        CPU_SEEDS: deterministic and on_cpu,
        CPU_EXPERTS: setup.routed_experts and on_cpu,
        CPU_ADAPTERS: bool(options.get("enable_lora")) and on_cpu,
    }
    return [hook.name for hook, requested in needed.items() if requested]


def tokens_in_flight(setup: EngineSetup) -> int:
    """Size of the KV cache on a CPU, in tokens: all sequences, but at most 200,000; further requests wait."""
    return min(max(setup.max_batch * setup.max_context_len, 20_000), 200_000)


def environment_for(
    setup: EngineSetup, devices: Sequence[str], tp_size: int, packages: str | None = None
) -> dict[str, str]:
    """`packages`: folder with `PACKAGES` for another interpreter; None: the run's own, which has them."""
    environment = dict(os.environ)
    if packages is not None:
        environment = {name: value for name, value in os.environ.items() if name not in OF_INTERPRETER}
        environment["PYTHONPATH"] = packages
    # Allows MARGIN.
    environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    # By default it closes connections that were idle for five seconds, even if a request has just arrived.
    environment["SGLANG_TIMEOUT_KEEP_ALIVE"] = "3600"
    # It caches the vision tower's features by image only, also after new weights, and no flush clears this cache.
    environment["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
    environment["SGLANG_MM_AVOID_RETOKENIZE"] = "1"
    loopback = interface_of(setup.host) if is_loopback(setup.host) else None
    if loopback is not None:
        # Everything that it talks to is on this machine; gloo's own choice is the address of the machine's name.
        environment.setdefault(GLOO_INTERFACE, loopback)
    if setup.device == "cpu":
        # One thread per process: with several on the same cores, throughput is a quarter. Without a compiled graph, the
        # first request does not wait for a compiler.
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        if tp_size > 1:
            # By default it binds every rank to the cores of a socket of its own.
            cores = sorted(os.sched_getaffinity(0))
            bound = (str(cores[rank % len(cores)]) for rank in range(tp_size))
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(bound)
    else:
        environment[DEVICES] = ",".join(devices)
        if setup.transport is not None and read_model_config(setup.model_path).get("quantization_config"):
            # On Blackwell it converts scales for its kernels after loading, and would treat new ones as converted.
            environment.setdefault("SGLANG_ENABLE_JIT_DEEPGEMM", "0")
    return environment


def log_of(setup: EngineSetup, place: int) -> Path:
    return setup.run_dir / "logs" / f"sglang-{setup.index}-{place}.log"


def name_of(config: SglangOptions, setup: EngineSetup, place: int) -> str:
    return f"engine {setup.index}" + (f", server {place}" if config.servers > 1 else "")


def begin_server(
    config: SglangOptions,
    setup: EngineSetup,
    place: int,
    pool: aiohttp.ClientSession,
    *,
    common_token: str | None = None,
    packages: str | None = None,
    gate: Path | None = None,
) -> SglangStarted:
    """Starts the process of a server; see `start_server`. `gate`: a file that its processes wait for when they have imported
    their modules."""
    options = options_for(config, setup, place)
    devices = devices_of(setup, place, config.servers) if setup.device == "cuda" else ()
    token = common_token or secrets.token_urlsafe(24)
    held = {"port": held_port(setup.host), "nccl_port": held_port()}
    if options.get("disaggregation_mode") == "prefill":
        held["disaggregation_bootstrap_port"] = held_port()
    ports = {name: number_of(port) for name, port in held.items()}
    waits = () if gate is None else (f"{GATE}{gate}",)
    process = ServerProcess(
        MODULE,
        options | ports | {"api_key": token},
        log=log_of(setup, place),
        form=SGLANG_LOG,
        environment=environment_for(setup, devices, options["tp_size"], packages),
        arguments=[*hooks_for(setup, options), *waits],
        python=config.python or sys.executable,
        gate=gate,
    )
    return SglangStarted(
        connection=SglangConnection(pool, address_of(setup.host, ports["port"]), token, name_of(config, setup, place)),
        process=process,
        held=tuple(held.values()),
        bootstrap_port=ports.get("disaggregation_bootstrap_port"),
    )


async def start_server(
    config: SglangOptions,
    setup: EngineSetup,
    place: int,
    pool: aiohttp.ClientSession,
    *,
    common_token: str | None = None,
    packages: str | None = None,
    begun: SglangStarted | None = None,
) -> SglangStarted:
    """Starts a server and waits until it responds. `common_token`: None gives it a token of its own. `packages`: see
    `environment_for`. `begun`: what `begin_server` returned for it. On a machine that is not
    the first one of an engine, starts that machine's part of the server. Raises EngineError with the log's last lines if it
    dies, or does not respond in time."""
    waiting = [] if begun is None else [begun]
    log = log_of(setup, place)
    serves = not setup.node_rank

    def begin() -> SglangStarted:
        if waiting:
            waiting[0].process.open_gate()
            return waiting.pop()
        return begin_server(config, setup, place, pool, common_token=common_token, packages=packages)

    async def is_up(started: SglangStarted) -> None:
        # With the token, because another server may have taken this port. On a further machine, a part of a server has only a
        # health route.
        if serves:
            await started.connection.get("/model_info", timeout_s=RESPONSE_S)
        await started.connection.get("/health", timeout_s=RESPONSE_S)
        if serves:
            # Imported modules and loaded weights stay. Garbage collection over them stops a server for a third of a second; on
            # a CPU, twice for each weight update.
            await started.connection.post("/freeze_gc", {}, timeout_s=config.control_timeout)

    return await start_until_up(
        name_of(config, setup, place), "SGLang", log, begin, is_up, timeout_s=config.start_timeout
    )
