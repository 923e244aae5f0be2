"""Features: the properties and capabilities that a server reports."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime_core.contracts.engine import Capability
from slime_core.contracts.setup import EngineSetup
from slime_core.errors import EngineError
from slime_sglang.config import SglangOptions
from slime_sglang.connection import SglangConnection
from slime_sglang.server.seeded_sampling import DRAWS_BY_TOKEN

TIMEOUT_S = 60.0
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Keys of config.json by which models of one architecture differ."""
STANDALONE = "STANDALONE"
"""Speculative decoding with a separate draft model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    sglang_version: str = "unknown"
    tp_size: int = 1
    pp_size: int = 1
    tokenizer: bool = True
    deterministic: bool = False
    memory_saver: bool = False
    version_spans: bool = False
    images: bool = False
    routed_experts: bool = False
    guided_decoding: bool = False
    other_draft: bool = False
    """See `has_other_draft`."""

    @classmethod
    async def of_all(cls, servers: Iterable[SglangConnection], config: SglangOptions, setup: EngineSetup) -> Features:
        """Features that all servers of an engine have. Raises EngineError also if they do not support the run's pause_mode."""
        # A server of a prefill/decode pair serves no request alone.
        first, *others = [await cls.of(server, config, setup, alone=not config.prefill_servers) for server in servers]
        found = first.common(others)
        if config.pause_mode != "abort" and not found.version_spans:
            raise EngineError(
                f'engine {setup.index}: engine.pause_mode = "{config.pause_mode}" requires a server that reports versions '
                f"by token span; SGLang {found.sglang_version} does not. Set abort."
            )
        return found

    @classmethod
    async def of(
        cls, server: SglangConnection, config: SglangOptions, setup: EngineSetup, *, alone: bool = True
    ) -> Features:
        """Reads the features of a server. `alone`: False for a server of a pair, which is not asked to generate. Raises
        EngineError if it has another model than the run, or does not respond like SGLang."""
        args = await server.get("/server_info", timeout_s=TIMEOUT_S)
        model = await server.get("/model_info", timeout_s=TIMEOUT_S)
        if not isinstance(args, Mapping) or not isinstance(model, Mapping) or "weight_version" not in model:
            raise EngineError(
                f"{server.name} does not respond like SGLang: /server_info {str(args)[:150]}, /model_info {str(model)[:150]}."
            )
        require_same_model(server, model, setup)
        require_adapters(server, args, config)
        return cls(
            sglang_version=str(args.get("version", "unknown")),
            tp_size=int(args.get("tp_size") or 1),
            pp_size=int(args.get("pp_size") or 1),
            tokenizer=not args.get("skip_tokenizer_init"),
            deterministic=bool(args.get("enable_deterministic_inference")) and await draws_by_token(server),
            memory_saver=bool(args.get("enable_memory_saver")),
            version_spans=alone and await reports_spans(server),
            # SGLang's image processor decodes the prompt, so it needs the tokenizer.
            images=bool(model.get("has_image_understanding")) and not args.get("skip_tokenizer_init"),
            # The decode server of a pair has not read the prompt.
            routed_experts=alone and bool(args.get("enable_return_routed_experts")),
            # Of its backends only this one takes every structural tag. Without a tokenizer there is none.
            guided_decoding=args.get("grammar_backend") == "xgrammar" and not args.get("skip_tokenizer_init"),
            other_draft=has_other_draft(args),
        )

    def common(self, others: Iterable[Features]) -> Features:
        """Features that this server and all `others` have."""
        result = self
        for other in others:
            if (other.tp_size, other.pp_size) != (self.tp_size, self.pp_size):
                raise EngineError("the servers of one engine must have equal tp_size and pp_size.")
            result = replace(
                result,
                tokenizer=result.tokenizer and other.tokenizer,
                deterministic=result.deterministic and other.deterministic,
                memory_saver=result.memory_saver and other.memory_saver,
                version_spans=result.version_spans and other.version_spans,
                images=result.images and other.images,
                routed_experts=result.routed_experts and other.routed_experts,
                guided_decoding=result.guided_decoding and other.guided_decoding,
                other_draft=result.other_draft or other.other_draft,
            )
        return result

    def capabilities(self, config: SglangOptions, setup: EngineSetup) -> frozenset[Capability]:
        offered = {Capability.SCORES, Capability.HTTP}
        if self.deterministic:
            offered |= {Capability.DETERMINISTIC, Capability.BATCH_INVARIANT}
        if config.pause_mode == "abort" or self.version_spans:
            offered.add(Capability.VERSION_SPANS)
        if self.memory_saver or setup.device == "cpu":
            offered.add(Capability.SLEEP)
        if self.images:
            offered.add(Capability.IMAGES)
        if not config.external_engine_addrs:
            # Their extension computes it.
            offered.add(Capability.CHECKSUM)
        if self.guided_decoding:
            offered.add(Capability.STRUCTURAL_TAG)
        if self.routed_experts:
            offered.add(Capability.ROUTED_EXPERTS)
        return frozenset(offered)


def has_other_draft(args: Mapping[str, Any]) -> bool:
    """Whether a server speculates with a draft model that gets no new weights. The model's own layers of multi-token
    prediction are no such draft: then SGLang reports the model's folder. A STANDALONE draft always is: SGLang crashes if a
    weight update includes it. `args`: the response of /server_info."""
    if str(args.get("speculative_algorithm")).upper() == STANDALONE:
        return True
    draft = args.get("speculative_draft_model_path")
    return draft is not None and draft != args.get("model_path")


async def reports_spans(server: SglangConnection) -> bool:
    """Whether responses have version spans; generates one token to find out."""
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
    response = await server.post("/generate", body, timeout_s=10 * TIMEOUT_S)
    try:
        return "weight_versions" in response["meta_info"]
    except (KeyError, TypeError) as error:
        raise EngineError(f"{server.name} does not respond like SGLang: /generate {str(response)[:300]}.") from error


async def draws_by_token(server: SglangConnection) -> bool:
    """Whether sampling is independent of the batch, which holds for servers that slime starts."""
    try:
        await server.post("/weights_checker", {"action": DRAWS_BY_TOKEN}, timeout_s=TIMEOUT_S)
    except EngineError:
        return False
    return True


def require_adapters(server: SglangConnection, args: Mapping[str, Any], config: SglangOptions) -> None:
    """EngineError for a server that does not hold the adapters of the run. args: the response of /server_info."""
    if not config.most_adapters:
        return
    most, rank = args.get("max_loaded_loras"), args.get("max_lora_rank") or 0
    if not args.get("enable_lora") or (most is not None and most < config.most_adapters) or rank < config.adapter_rank:
        raise EngineError(
            f"{server.name}: start this server with --enable-lora, --max-loaded-loras {config.most_adapters} or more, "
            f"--max-lora-rank {config.adapter_rank} or more and --lora-target-modules."
        )


def require_same_model(server: SglangConnection, model: Mapping[str, Any], setup: EngineSetup) -> None:
    own = read_config(setup.model_path)
    reported = {key: model.get(key) for key in ("model_type", "architectures")}
    # If its folder is on another machine, wrong shapes are detected when weights are loaded.
    theirs = read_config(Path(str(model.get("model_path"))))
    found = reported | {key: theirs[key] for key in SIZES if key in theirs}
    problems = [
        f"{key} {value} instead of {own[key]}"
        for key, value in found.items()
        if value is not None and own.get(key) is not None and value != own[key]
    ]
    if problems:
        raise EngineError(
            f"{server.name} has another model than the run: {', '.join(problems)}. It serves {model.get('model_path')}, "
            f"the run trains {setup.model_path}."
        )


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json; {} if it does not exist."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config
