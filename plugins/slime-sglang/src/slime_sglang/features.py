"""Features: what a server said that it is and can do."""

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
from slime_sglang.connection import Connection
from slime_sglang.server.draws import DRAWS_BY_TOKEN

TIMEOUT_S = 60.0
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Keys of config.json that tell one model from another of its architecture."""
STANDALONE = "STANDALONE"
"""Speculative decoding by a whole model of its own."""


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
    other_draft: bool = False
    """See `has_other_draft`."""

    @classmethod
    async def of_all(cls, servers: Iterable[Connection], config: SglangOptions, setup: EngineSetup) -> Features:
        """What all servers of an engine can do. EngineError also where they cannot pause as the run wants it."""
        # A server that is one half of a pair answers no request alone.
        first, *others = [await cls.of(server, setup, alone=not config.prefill_servers) for server in servers]
        found = first.common(others)
        if config.pause_mode != "abort" and not found.version_spans:
            raise EngineError(
                f'engine {setup.index}: engine.pause_mode = "{config.pause_mode}" needs a server that reports versions by '
                f"token span; SGLang {found.sglang_version} does not. Use abort."
            )
        return found

    @classmethod
    async def of(cls, server: Connection, setup: EngineSetup, *, alone: bool = True) -> Features:
        """Asks the server; one that is not `alone` for no tokens. EngineError if it has another model than the run, or no
        answer of SGLang's."""
        args = await server.get("/server_info", timeout_s=TIMEOUT_S)
        model = await server.get("/model_info", timeout_s=TIMEOUT_S)
        if not isinstance(args, Mapping) or not isinstance(model, Mapping) or "weight_version" not in model:
            raise EngineError(
                f"{server.name} does not answer like SGLang: /server_info {str(args)[:150]}, /model_info {str(model)[:150]}."
            )
        require_same_model(server, model, setup)
        return cls(
            sglang_version=str(args.get("version", "unknown")),
            tp_size=int(args.get("tp_size") or 1),
            pp_size=int(args.get("pp_size") or 1),
            tokenizer=not args.get("skip_tokenizer_init"),
            deterministic=bool(args.get("enable_deterministic_inference")) and await draws_by_token(server),
            memory_saver=bool(args.get("enable_memory_saver")),
            version_spans=alone and await reports_spans(server),
            # Its processor decodes the prompt, so it needs the tokenizer.
            images=bool(model.get("has_image_understanding")) and not args.get("skip_tokenizer_init"),
            # The second of a pair has not read the prompt.
            routed_experts=alone and bool(args.get("enable_return_routed_experts")),
            other_draft=has_other_draft(args),
        )

    def common(self, others: Iterable[Features]) -> Features:
        """What all servers of an engine can do."""
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
        if self.routed_experts:
            offered.add(Capability.ROUTED_EXPERTS)
        return frozenset(offered)


def has_other_draft(args: Mapping[str, Any]) -> bool:
    """Whether a server speculates with a model that new weights are none of. What the model itself brings for it (layers of
    multi-token prediction) is no such: there SGLang names the model's folder. A STANDALONE draft always is: SGLang dies of a
    push that is meant for it too. `args`: the answer of /server_info."""
    if str(args.get("speculative_algorithm")).upper() == STANDALONE:
        return True
    draft = args.get("speculative_draft_model_path")
    return draft is not None and draft != args.get("model_path")


async def reports_spans(server: Connection) -> bool:
    """Generates a token to see."""
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
    answer = await server.post("/generate", body, timeout_s=10 * TIMEOUT_S)
    try:
        return "weight_versions" in answer["meta_info"]
    except (KeyError, TypeError) as error:
        raise EngineError(f"{server.name} does not answer like SGLang: /generate {str(answer)[:300]}.") from error


async def draws_by_token(server: Connection) -> bool:
    """Whether a request's draws are the same in every batch: in the servers that slime starts."""
    try:
        await server.post("/weights_checker", {"action": DRAWS_BY_TOKEN}, timeout_s=TIMEOUT_S)
    except EngineError:
        return False
    return True


def require_same_model(server: Connection, model: Mapping[str, Any], setup: EngineSetup) -> None:
    own = read_config(setup.model_path)
    told = {key: model.get(key) for key in ("model_type", "architectures")}
    # Where its folder is on another machine, wrong shapes show when weights are loaded.
    theirs = read_config(Path(str(model.get("model_path"))))
    found = told | {key: theirs[key] for key in SIZES if key in theirs}
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
    """config.json; empty if there is none."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config
