"""Options, environment and start of a server of the run."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp

from slime_core.contracts.setup import EngineSetup
from slime_serving.devices import DEVICES, devices_of
from slime_serving.held_port import held_port, number_of
from slime_serving.listener import is_loopback
from slime_serving.server_group import Started
from slime_serving.server_process import ServerProcess, address_of
from slime_serving.start import RESPONSE_S, start_until_up
from slime_vllm.adapter import environment_of, options_of
from slime_vllm.config import DRAFTS, VllmOptions, parts_of, server_options
from slime_vllm.connection import VLLM_LOG, VllmConnection

MODULE: Final = "slime_vllm_server.launch"
FOLDER: Final = Path(__file__).parent / "server"
"""On the module search path of the server."""
TOKEN: Final = "SLIME_VLLM_TOKEN"
"""See slime_vllm_server.auth."""
GATE: Final = "gate="
"""See slime_vllm_server.gate."""
WAITING_S: Final = 24 * 3600
"""For which vLLM waits for its engine process: as long as trainers may take to load (`engine.start_timeout` comes after)."""
EXTENSION: Final = "slime_vllm_server.worker.WorkerExtension"
BACKEND: Final = "slime"
"""Of vLLM's weight transfers, the one that the extension registers."""
SEQUENCES: Final = 256
"""vLLM's least limit of sequences in a batch on GPUs; on those of 70 GB and more it is 1,024."""
IN_GRAPHS: Final = 512
"""Sequences that vLLM decodes by a CUDA graph at most, by default."""
MOST_IN_GRAPHS: Final = 1024
"""More are decoded without a graph: each size takes memory and time at the start."""
SETS_GRAPHS: Final = frozenset(
    {"max_cudagraph_capture_size", "cudagraph_capture_sizes", "compilation_config", "enforce_eager"}
)
MAX_SEQUENCES_ON_CPU: Final = 256
MIN_BATCH_ON_CPU: Final = 4096
"""Tokens."""
KV_GIB_ON_CPU: Final = 1
"""For keys and values of a process."""


def options_for(config: VllmOptions, setup: EngineSetup, place: int) -> dict[str, Any]:
    """vLLM's options, without the port."""
    chosen = server_options(config)
    on_cpu = setup.device == "cpu"
    tp_size = setup.num_devices // parts_of(config)
    options: dict[str, Any] = {
        "model": str(setup.model_path),
        "trust_remote_code": setup.trust_remote_code,
        "seed": setup.seed + place,
        "host": setup.host,
        "tensor_parallel_size": tp_size,
        "max_model_len": setup.max_context_len,
        # The trainers' compute dtypes on these devices, independent of the dtype of the folder.
        "dtype": "float32" if on_cpu else "bfloat16",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 1,
        # How many tokens of a prompt were cached.
        "enable_prompt_tokens_details": True,
        # Routes with tokens in and tokens out.
        "enable_scale_out": True,
        "worker_extension_cls": EXTENSION,
        "weight_transfer_config": {"backend": BACKEND},
        "middleware": ["slime_vllm_server.auth.RequireToken"],
        "disable_uvicorn_access_log": True,
    }
    options |= options_of(config, setup)
    if on_cpu:
        options |= {
            "enforce_eager": True,
            # A part of a prompt that ends a step ends vLLM, if the request has a seed: it sets back the seed's generator, whose
            # position torch has on GPUs alone.
            "enable_chunked_prefill": False,
            "max_num_seqs": min(setup.max_batch, MAX_SEQUENCES_ON_CPU),
            "max_num_batched_tokens": max(setup.max_context_len, MIN_BATCH_ON_CPU),
            "distributed_executor_backend": "uni" if tp_size == 1 else "mp",
        }
    else:
        options |= batch_sizes(config, setup, chosen)
    if setup.offload and not on_cpu:
        options["enable_sleep_mode"] = True
    if config.pause_mode == "in_place":
        options["enable_prefix_caching"] = False
    if any(name in chosen for name in DRAFTS):
        options["per_request_spec_decode_metrics"] = "summary"
    if not has_tokenizer(setup):
        options["skip_tokenizer_init"] = True
    return options | chosen


def batch_sizes(config: VllmOptions, setup: EngineSetup, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a server on a GPU by which its share of the requests in flight is one batch, as far as vLLM's own limits are
    lower and the run file sets none."""
    share = -(-setup.max_batch // (config.servers * chosen.get("data_parallel_size", 1)))
    options: dict[str, Any] = {}
    if share > SEQUENCES:
        options["max_num_seqs"] = share
    in_graphs = min(share, chosen.get("max_num_seqs", share), MOST_IN_GRAPHS)
    if in_graphs > IN_GRAPHS and not SETS_GRAPHS & chosen.keys():
        options["max_cudagraph_capture_size"] = in_graphs
    return options


def has_tokenizer(setup: EngineSetup) -> bool:
    """Whether the servers are started with the model's tokenizer."""
    return (setup.model_path / "tokenizer_config.json").exists()


def environment_for(config: VllmOptions, setup: EngineSetup, devices: Sequence[str], token: str) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
    environment |= {
        "PYTHONPATH": str(FOLDER),
        TOKEN: token,
        # Pauses, weight updates and cache resets are routes of this mode.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
        "VLLM_LOGGING_COLOR": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if is_loopback(setup.host):
        environment["VLLM_HOST_IP"] = setup.host
    if setup.device == "cpu":
        # One thread per process: with several on the same cores, throughput is a quarter.
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB_ON_CPU),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
    else:
        environment[DEVICES] = ",".join(devices)
    return environment | environment_of(config, setup)


def log_of(setup: EngineSetup, place: int) -> Path:
    return setup.run_dir / "logs" / f"vllm-{setup.index}-{place}.log"


def name_of(config: VllmOptions, setup: EngineSetup, place: int) -> str:
    return f"engine {setup.index}" + (f", server {place}" if config.servers > 1 else "")


def begin_server(
    config: VllmOptions, setup: EngineSetup, place: int, pool: aiohttp.ClientSession, *, gate: Path | None = None
) -> Started[VllmConnection]:
    """Starts the process of a server. `gate`: a file that its workers wait for when they have imported their modules."""
    options = options_for(config, setup, place)
    devices = devices_of(setup, place, config.servers) if setup.device == "cuda" else ()
    held, token = held_port(setup.host), secrets.token_urlsafe(24)
    port = number_of(held)
    environment = environment_for(config, setup, devices, token)
    if gate is not None:
        environment["VLLM_ENGINE_READY_TIMEOUT_S"] = str(WAITING_S)
    process = ServerProcess(
        MODULE,
        options | {"port": port},
        log=log_of(setup, place),
        form=VLLM_LOG,
        environment=environment,
        arguments=() if gate is None else (f"{GATE}{gate}",),
        python=sys.executable if config.python is None else str(config.python),
        gate=gate,
    )
    connection = VllmConnection(pool, address_of(setup.host, port), token, name_of(config, setup, place))
    return Started(connection=connection, process=process, held=(held,))


async def start_server(
    config: VllmOptions,
    setup: EngineSetup,
    place: int,
    pool: aiohttp.ClientSession,
    *,
    begun: Started[VllmConnection] | None = None,
) -> Started[VllmConnection]:
    """Starts a server and waits until it responds. `begun`: what `begin_server` returned for it. Raises EngineError with the
    log's last lines if it dies, or does not respond in time."""
    waiting = [] if begun is None else [begun]

    def begin() -> Started[VllmConnection]:
        if waiting:
            waiting[0].process.open_gate()
            return waiting.pop()
        return begin_server(config, setup, place, pool)

    async def is_up(started: Started[VllmConnection]) -> None:
        # With the token, because another server may have taken this port.
        await started.connection.get("/weight_info", timeout_s=RESPONSE_S)
        await started.connection.get("/health", timeout_s=RESPONSE_S)

    name, log = name_of(config, setup, place), log_of(setup, place)
    return await start_until_up(name, "vLLM", log, begin, is_up, timeout_s=config.start_timeout)
