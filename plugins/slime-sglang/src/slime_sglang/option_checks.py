"""Checks of combinations of options, and of options with the run's devices and weights. Imports nothing heavy."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Final, Literal

from slime_core.contracts.setup import EngineLayout, EngineSetup
from slime_core.data.model_folder import read_model_config
from slime_core.errors import near_matches
from slime_serving.adapter_options import problem_of_offload, problems_of_adapters
from slime_serving.interpreter import program_in
from slime_sglang import router_args
from slime_sglang.config import SglangOptions, no_choice, options_of_role, server_options
from slime_sglang.program import SGLANG
from slime_sglang.renamed_options import other_names
from slime_sglang.server_args import options_of

ROLES: Final[tuple[Literal["prefill", "decode"], ...]] = ("prefill", "decode")
SHARED: Final = frozenset({"pp_size", "quantization", "kv_cache_dtype", "page_size", "disaggregation_transfer_backend"})
"""Options that servers of one engine share: they hold the same weights, and send each other keys and values."""
MLP_PADDING: Final = 32
"""SGLang's for CPUs, which have kernels for such widths alone."""


def problems_of_options(config: Any) -> list[str]:
    """Problems of options that exclude each other, each a sentence for the user."""
    problems = []
    if not config.external_engine_addrs:
        problems += problems_of_program(config)
    count = len(config.external_engine_addrs)
    if count % config.servers:
        problems.append(
            f"engine.external_engine_addrs names {count} servers, not a multiple of engine.servers = {config.servers}."
        )
    given = server_options(config)
    if count and given:
        problems.append(
            f"engine.{next(iter(given))} = {next(iter(given.values()))!r}: an option of a server that the run starts, but "
            "engine.external_engine_addrs names servers that run already. Omit it."
        )
    if count and config.deterministic is not None:
        problems.append("engine.deterministic: it was decided when the external servers were started. Omit it.")
    if config.prefill_servers:
        problems += problems_of_prefill(config)
    if config.router_policy != "none" and not router_args.router_options():
        problems.append(
            f'engine.router_policy = "{config.router_policy}": sglang-router is not installed here: '
            '`pip install "slime-sglang[server]"`; on a CPU `pip install --no-deps sglang-router`.'
        )
    if config.router_options and config.router_policy == "none":
        problems.append("engine.router_options: there is no router. Choose an engine.router_policy.")
    problems += problems_of_replicas("engine", given)
    for role in ROLES:
        problems += problems_of_role(config, role, given)
    return problems


def problems_of_program(config: Any) -> list[str]:
    """Problems of the SGLang that starts the servers: there is none, or it has not all options under these names."""
    installed = program_in(config.python, SGLANG)
    if isinstance(installed, str):
        where = "engine.name" if config.python is None else "engine.python"
        return [f"{where}: {installed} {SGLANG.install}"]
    if config.python is None:
        # The options are those of this one.
        return []
    known = {option.name: option for option in options_of(installed.folder)}
    renamed = {other.current: other.name for other in other_names(known)} | {
        other.name: other.current for other in other_names(known)
    }
    problems = []
    given = server_options(config) | config.prefill_options | config.decode_options
    for name, value in given.items():
        if name not in known:
            close = [renamed[name]] if name in renamed else near_matches(name, known)
            hint = f" Close: {', '.join(close)}." if close else ""
            problems.append(f"engine.{name}: SGLang {installed.version} of {config.python} has no such option.{hint}")
        elif (choices := known[name].choices) and not isinstance(value, list) and value not in choices:
            problems.append(f"engine.{name} = {value!r}: {no_choice(value, choices)}.")
    return problems


def problems_of_replicas(where: str, options: Mapping[str, Any]) -> list[str]:
    """`options`: of a server; `where`: the table that gives them."""
    replicas = options.get("dp_size")
    if replicas in (None, 1) or options.get("enable_dp_attention"):
        return []
    return [
        f"{where}.dp_size = {replicas}: SGLang loads new weights into one replica only. Use engine.servers = {replicas}, or "
        "more engines."
    ]


def problems_of_role(config: SglangOptions, role: Literal["prefill", "decode"], given: Mapping[str, Any]) -> list[str]:
    """`given`: options of all servers."""
    own, where = options_of_role(config, role), f"engine.{role}_options"
    if not own:
        return []
    if not config.prefill_servers:
        return [f"{where}: every server prefills and decodes. Set engine.prefill_servers, or leave it out."]
    problems = [
        f"{where}.{name} = {own[name]!r}: it must be the same for all servers of an engine. Set engine.{name}."
        for name in sorted(own.keys() & SHARED)
    ]
    return problems + problems_of_replicas(where, {**given, **own} if "dp_size" in own else {})


def problems_of_layout(config: Any, layout: EngineLayout) -> list[str]:
    """Options that do not fit the engines and devices of the run."""
    problems = [problem_of_experts(config)] if layout.routed_experts else []
    problems += problems_of_adapters(config, layout, getattr(config, "pp_size", None) or 1)
    problems += problems_of_served_adapters(config) if config.most_adapters else []
    if layout.offload and config.pause_mode != "abort":
        problems.append(
            f'engine.pause_mode = "{config.pause_mode}", launcher.offload_rollout: paused requests stay on the servers, '
            "which cannot release their memory then. Set abort, or pass --no-offload-rollout."
        )
    if config.external_engine_addrs:
        problems.append(problem_of_external(config, layout.num_engines))
    else:
        problems.append(problem_of_devices(config, layout.num_devices, layout.num_nodes, layout.devices_flag))
    return [problem for problem in problems if problem is not None]


def problems_of_served_adapters(config: Any) -> list[str]:
    """Options of SGLang that exclude adapters."""
    where = f"engine.max_adapters = {config.max_adapters}"
    problems = []
    if config.router_policy != "none":
        problems.append(
            f'{where}, engine.router_policy = "{config.router_policy}": requests of adapters go to servers directly. Set none.'
        )
    if (getattr(config, "dp_size", None) or 1) > 1:
        problems.append(f"{where}, engine.dp_size: SGLang loads no adapters while it runs then. Use engine.servers.")
    held = max(config.most_adapters, config.adapter_places + 1)
    if getattr(config, "enable_lora_overlap_loading", None) and held > 2 * (config.adapter_places + 1):
        problems.append(
            f"{where}, engine.enable_lora_overlap_loading: SGLang holds up to twice as many adapters as it has places then. "
            f"Set engine.adapters_at_once = {-(-held // 2) - 1}, or leave it out."
        )
    return problems


def problem_of_adapters(config: Any, setup: EngineSetup) -> str | None:
    """Why the servers cannot hold adapters of this model on these devices; None: they can."""
    if problem := problem_of_offload(config, offload=setup.offload):
        return problem
    model = read_model_config(setup.model_path)
    width = (model.get("text_config") or model).get("intermediate_size") or 0
    if setup.device == "cpu" and not config.external_engine_addrs and width % (MLP_PADDING * setup.num_devices):
        return (
            f"engine.max_adapters = {config.max_adapters}: on a CPU SGLang pads MLPs to multiples of {MLP_PADDING} features "
            f"for each device, and adapters for the model's {width} do not fit then. Use GPUs, or another engine."
        )
    return None


def problems_of_push(config: Any, quantization: Mapping[str, Any] | None) -> list[str]:
    """Problems of weight updates. SGLang stores float8 by block unchanged; it rearranges weights of every other scheme, and
    cannot load new ones into these."""
    asked = getattr(config, "quantization", None)
    if asked is not None and quantization is None:
        return [
            f'engine.quantization = "{asked}": SGLang quantizes weights when it starts, and takes no new ones afterwards. '
            "Omit it, and pass --rollout-load FOLDER with a folder that `slime convert MODEL FOLDER --to fp8` writes."
        ]
    if quantization is not None and not is_by_block(quantization):
        return [
            f"model.rollout_load: its weights are quantized ({quantization.get('quant_method')}), not in float8 by block, "
            "and SGLang takes no new ones then. Use a folder that `slime convert MODEL FOLDER --to fp8` writes."
        ]
    return []


TRANSFER_PACKAGES: Final = {
    "mooncake": "`pip install mooncake-transfer-engine`, without a GPU `pip install mooncake-transfer-engine-non-cuda`",
    "nixl": "`pip install nixl`",
}
"""How to install the backends that send the KV cache from prefill to decode servers, by their import names."""


def problems_of_prefill(config: SglangOptions) -> list[str]:
    given = f"engine.prefill_servers = {config.prefill_servers}"
    problems = []
    if config.prefill_servers >= config.servers:
        problems.append(
            f"{given}, engine.servers = {config.servers}: no server is left to decode. Set engine.servers = "
            f"{config.prefill_servers + 1} or more."
        )
    if config.router_policy == "none":
        problems.append(f"{given}: this requires a router that pairs the servers. Set engine.router_policy.")
    if config.external_engine_addrs:
        problems.append(f"{given}: external servers cannot be paired by the run. Omit it.")
    if config.pause_mode != "abort":
        problems.append(f'{given}, engine.pause_mode = "{config.pause_mode}": a request is on two servers. Set abort.')
    # SGLang's own default.
    backend = getattr(config, "disaggregation_transfer_backend", None) or "mooncake"
    if config.python is None and backend in TRANSFER_PACKAGES and importlib.util.find_spec(backend) is None:
        problems.append(
            f'{given}: the KV cache is sent over "{backend}", which is not installed here: {TRANSFER_PACKAGES[backend]}. Or '
            "set another engine.disaggregation_transfer_backend."
        )
    return problems


def problem_of_devices(config: Any, num_devices: int, num_nodes: int, flag: str) -> str | None:
    """Why the devices of an engine do not fit its servers. `flag`: the flag that sets the number of an engine's devices."""
    servers, stages = config.servers, getattr(config, "pp_size", None) or 1
    if num_nodes > 1 and servers > 1:
        return (
            f"engine.servers = {servers}: the {num_devices} devices of an engine are on {num_nodes} machines, which one server "
            f"can span, but not several. Omit engine.servers, or use more engines with fewer devices each ({flag})."
        )
    if num_devices % (servers * stages):
        shares = f"engine.servers = {servers}" + (f" of engine.pp_size = {stages}" if stages > 1 else "")
        return (
            f"{shares}: the {num_devices} device(s) of an engine cannot be shared equally. Pass {flag} {servers * stages} or a "
            "multiple; on a CPU devices are processes."
        )
    return None


def problem_of_external(config: Any, num_engines: int) -> str | None:
    named, needed = len(config.external_engine_addrs), num_engines * config.servers
    if named >= needed:
        return None
    return (
        f"engine.external_engine_addrs names {named} servers, but {num_engines} engines of {config.servers} need {needed}. "
        "Name more, or lower launcher.rollout_num_gpus."
    )


def problem_of_experts(config: Any) -> str | None:
    """Why servers cannot return expert ids; None if they can."""
    if config.router_policy == "none":
        return None
    # sglang-router's requests have a fixed set of fields, and drop all others.
    return (
        f'engine.router_policy = "{config.router_policy}": sglang-router does not forward the request for expert ids '
        "(train.use_rollout_routing_replay). Set none: requests then go to the servers directly, and router.middlewares has "
        "policies for them."
    )


def is_by_block(quantization: Mapping[str, Any]) -> bool:
    return quantization.get("quant_method") == "fp8" and bool(quantization.get("weight_block_size"))
