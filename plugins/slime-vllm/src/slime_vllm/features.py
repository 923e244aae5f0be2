"""What a server reports of its options: those of an external one are not ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from slime_core.contracts.setup import EngineSetup
from slime_core.data.model_folder import read_model_config
from slime_core.errors import EngineError, EngineUnavailable
from slime_vllm.adapter import ROUTES
from slime_vllm.config import VllmOptions
from slime_vllm.connection import VllmConnection
from slime_vllm.launching import BACKEND, EXTENSION, has_tokenizer, options_for

TIMEOUT_S: Final = 60.0
SIZES: Final = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    ranks: int
    """Processes of a server that hold weights, those of all its replicas."""
    tokenizer: bool
    prefix_caching: bool
    grammar_backend: str
    has_priorities: bool

    @property
    def guided_decoding(self) -> bool:
        """Of vLLM's backends only this one takes every structural tag, and needs a tokenizer."""
        return self.tokenizer and self.grammar_backend in ("auto", "xgrammar")

    @classmethod
    def of_options(cls, options: Mapping[str, Any], setup: EngineSetup) -> Features:
        """Of a server that was started with these options."""
        return cls(
            ranks=options["tensor_parallel_size"]
            * options.get("pipeline_parallel_size", 1)
            * options.get("data_parallel_size", 1),
            tokenizer=has_tokenizer(setup),
            prefix_caching=options.get("enable_prefix_caching", True),
            grammar_backend=(options.get("structured_outputs_config") or {}).get("backend", "auto"),
            has_priorities=options.get("scheduling_policy") == "priority",
        )

    @classmethod
    async def of_all(cls, servers: Sequence[VllmConnection], config: VllmOptions, setup: EngineSetup) -> Features:
        """Of the servers of an engine, which must agree. Raises EngineError also if they cannot pause as the run asks."""
        if not config.external_engine_addrs:
            return cls.of_options(options_for(config, setup, 0), setup)
        first, *others = [await cls.of_external(server, config, setup) for server in servers]
        for server, found in zip(servers[1:], others, strict=True):
            if found != first:
                raise EngineError(f"{server.name}: it was started with other options than {servers[0].name}.")
        if first.prefix_caching and config.pause_mode == "in_place":
            raise EngineError(
                f'{servers[0].name}: engine.pause_mode = "in_place" needs servers that were started with '
                "--no-enable-prefix-caching."
            )
        return first

    @classmethod
    async def of_external(cls, server: VllmConnection, config: VllmOptions, setup: EngineSetup) -> Features:
        """Raises EngineError for a server with another model, or that was started without what the README lists."""
        try:
            response = await server.post("/collective_rpc", {"method": "served_options"}, timeout_s=TIMEOUT_S)
            # Replicas of a model without experts do not know of each other.
            together = await server.get("/get_world_size", timeout_s=TIMEOUT_S)
        except EngineUnavailable:
            raise
        except EngineError as error:
            raise EngineError(f"{error} Was this server started with --worker-extension-cls {EXTENSION}?") from error
        try:
            given = response["results"][0]
            adapters = f"with {ROUTES}=1, --enable-lora, --max-loras 1, --max-lora-rank {setup.adapter_rank} or more"
            several = f"with {ROUTES}=1, --enable-lora, --max-cpu-loras {config.max_adapters} or more, --max-lora-rank "
            several += f"{config.adapter_rank} or more, --max-logprobs -1"
            missing = [
                text
                for text, fits in {
                    "with --logprobs-mode processed_logprobs": given["logprobs_mode"] == "processed_logprobs",
                    f'with --weight-transfer-config \'{{"backend": "{BACKEND}"}}\'': setup.transport is None
                    or given["weight_transfer_backend"] == BACKEND,
                    adapters: takes_adapter(given, setup),
                    several: takes_adapters(given, config),
                }.items()
                if not fits
            ]
            found = cls(
                ranks=int(together["world_size"]),
                tokenizer=not given["skip_tokenizer_init"],
                prefix_caching=bool(given["enable_prefix_caching"]),
                grammar_backend=str(given["grammar_backend"]),
                has_priorities=given["scheduling_policy"] == "priority",
            )
            path = Path(given["model"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineError(
                f"{server.name} does not respond like vLLM with slime's extension: {type(error).__name__}: {error}. It is "
                f"{str(response)[:300]}"
            ) from error
        if missing:
            raise EngineError(f"{server.name}: start this server {', '.join(missing)}.")
        require_same_model(server, path, setup)
        return found


def takes_adapter(given: Mapping[str, Any], setup: EngineSetup) -> bool:
    """`given`: the worker's `served_options`. With several adapters it would not be known which one an update replaces."""
    if not setup.adapter_rank:
        return True
    return given["max_loras"] >= 1 and given["max_lora_rank"] >= setup.adapter_rank and given["loads_adapters"]


def takes_adapters(given: Mapping[str, Any], config: VllmOptions) -> bool:
    """`given`: the worker's `served_options`."""
    if not config.most_adapters:
        return True
    room = given["max_cpu_loras"] >= config.most_adapters and given["max_lora_rank"] >= config.adapter_rank
    return bool(room and given["max_logprobs"] == -1 and given["loads_adapters"])


def require_same_model(server: VllmConnection, path: Path, setup: EngineSetup) -> None:
    """If its folder is on another machine, wrong shapes are found when weights are loaded."""
    if not (path / "config.json").is_file():
        return
    own, theirs = read_model_config(setup.model_path), read_model_config(path)
    problems = [
        f"{key} {theirs.get(key)} instead of {own[key]}" for key in SIZES if key in own and theirs.get(key) != own[key]
    ]
    if problems:
        raise EngineError(
            f"{server.name} has another model than the run: {', '.join(problems)}. It serves {path}, the run trains "
            f"{setup.model_path}."
        )
