"""Checks of combinations of options, and of options with the run's devices. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from slime_core.contracts.setup import EngineLayout
from slime_core.errors import near_matches
from slime_serving.adapter_options import problems_of_adapters
from slime_serving.interpreter import program_in
from slime_vllm.adapter import RANKS
from slime_vllm.config import DRAFTS, parts_of, server_options
from slime_vllm.program import VLLM
from slime_vllm.server_args import options_in

AT_LOAD: Final = ("fp8", "fp8_per_tensor", "fp8_per_block")
"""Quantizations that vLLM computes from plain weights, and again from new ones."""


def problems_of_options(config: Any) -> list[str]:
    """Problems of options that exclude each other, each a sentence for the user."""
    problems = []
    given = server_options(config)
    count = len(config.external_engine_addrs)
    if not count:
        installed = program_in(config.python, VLLM)
        if isinstance(installed, str):
            where = "engine.name" if config.python is None else "engine.python"
            problems.append(f"{where}: {installed} {VLLM.install}")
        else:
            known = {option.name for option in options_in(installed.folder)}
            for name in sorted(set(given) - known):
                close = near_matches(name, known)
                hint = f" Close: {', '.join(close)}." if close else ""
                problems.append(f"engine.{name}: vLLM {installed.version} has no such option.{hint}")
    if count % config.servers:
        problems.append(
            f"engine.external_engine_addrs names {count} servers, not a multiple of engine.servers = {config.servers}."
        )
    if count and given:
        problems.append(
            f"engine.{next(iter(given))} = {next(iter(given.values()))!r}: an option of a server that the run starts, but "
            "engine.external_engine_addrs names servers that run already. Omit it."
        )
    return problems


def problems_of_layout(config: Any, layout: EngineLayout) -> list[str]:
    """Options that do not fit the engines and devices of the run."""
    problems = []
    if layout.device is not None and (problem := problem_of_device(config, layout.device)):
        problems.append(problem)
    if layout.num_nodes > 1:
        problems.append(
            f"{layout.devices_flag}: an engine of slime-vllm is on one machine, and this one would be on {layout.num_nodes}."
        )
    if layout.offload and config.pause_mode != "abort":
        problems.append(
            f'engine.pause_mode = "{config.pause_mode}", launcher.offload_rollout: paused requests stay on the servers, '
            "which cannot release their memory then. Set abort, or pass --no-offload-rollout."
        )
    if layout.routed_experts:
        problems.append("train.use_rollout_routing_replay: slime-vllm does not read expert ids. Use engine sglang.")
    if layout.adapter_rank:
        problems += problems_of_adapter(config, layout)
    problems += problems_of_adapters(config, layout, server_options(config).get("pipeline_parallel_size", 1))
    if config.most_adapters and config.adapter_rank > RANKS[-1]:
        problems.append(
            f"engine.max_adapter_rank = {config.adapter_rank}: vLLM takes adapters of rank {RANKS[-1]} at most."
        )
    parts = parts_of(config)
    if not config.external_engine_addrs and layout.num_devices % parts:
        problems.append(
            f"{layout.devices_flag}: an engine's {layout.num_devices} devices are not a multiple of engine.servers x "
            f"pipeline_parallel_size x data_parallel_size = {parts}."
        )
    return problems


def problems_of_adapter(config: Any, layout: EngineLayout) -> list[str]:
    """Options that the transport `adapter` excludes."""
    problems = []
    if layout.adapter_rank > RANKS[-1]:
        problems.append(
            f'sync.transport = "adapter": vLLM takes adapters of rank {RANKS[-1]} at most, and this one has rank '
            f"{layout.adapter_rank}. Pass a smaller --lora-rank, or another --transport, which sends merged weights."
        )
    if layout.offload and config.sleep_level == 2:
        problems.append(
            'engine.sleep_level = 2, sync.transport = "adapter": the weights would be dropped, and no update sends them again. '
            "Set sleep_level = 1."
        )
    stages = server_options(config).get("pipeline_parallel_size", 1)
    if stages > 1:
        problems.append(
            f'engine.pipeline_parallel_size = {stages}, sync.transport = "adapter": a stage does not know layers of another '
            "stage, which would look like parts of the adapter that vLLM ignores. Omit it, or pass another --transport."
        )
    return problems


def problems_of_push(config: Any, quantization: Mapping[str, Any] | None) -> list[str]:
    """Problems of weight updates. `quantization`: of the loaded folder; None: plain weights."""
    if quantization is not None:
        return [
            f"model.rollout_load: its weights are quantized ({quantization.get('quant_method')}), and slime-vllm sends plain "
            "ones. Omit it, and pass --vllm-quantization fp8: vLLM quantizes plain weights itself."
        ]
    asked = getattr(config, "quantization", None)
    if asked not in (None, *AT_LOAD):
        return [
            f'engine.quantization = "{asked}": vLLM takes no new weights then. Set one of {", ".join(AT_LOAD)}, which it '
            "computes from plain weights, or omit it."
        ]
    return []


def problem_of_device(config: Any, device: str) -> str | None:
    """Why the servers cannot be started on this device; None: they can."""
    asked = getattr(config, "quantization", None)
    if device == "cpu" and asked in AT_LOAD:
        return f'engine.quantization = "{asked}": vLLM for CPUs has no float8 kernels. Omit it.'
    if device == "cpu" and getattr(config, "enable_chunked_prefill", None):
        return (
            "engine.enable_chunked_prefill: on a CPU, vLLM dies of a prompt that is computed in several steps, with the seeds "
            "that a run's requests have. Omit it."
        )
    if device == "cpu" and (drafts := next((name for name in DRAFTS if getattr(config, name, None)), None)):
        return (
            f"engine.{drafts}: with drafts, vLLM for CPUs returns log-probs that are not those of its tokens (some are below "
            "-9000). Omit it."
        )
    return None
