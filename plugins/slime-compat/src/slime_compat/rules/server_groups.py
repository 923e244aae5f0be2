"""The rule for `--sglang-config`, a YAML file with groups of servers for each model.

Here the trained model's engines are alike: each has one server, or several with equal shares of its devices, of which some may
only prefill. So groups of servers with different numbers of GPUs have no counterpart.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped]
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from slime_compat.translation import Translation

FLAG: Final = "sglang-config"
SERVED: Final = ("teacher", "reward")
"""Names of models beside the trained one that have a table here (engines.NAME)."""
KINDS: Final = ("regular", "prefill", "decode")
"""Groups that start servers of a kind that there is here."""


class Group(BaseModel):
    """Servers of one kind, with upstream's keys."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    worker_type: str
    num_gpus: int = Field(gt=0)
    """Of all its servers."""
    num_gpus_per_engine: int | None = Field(None, gt=0)
    """Of one server."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Options of SGLang."""


class Model(BaseModel):
    """The servers of one model."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    name: str
    model_path: str | None = None
    update_weights: bool | None = None
    num_gpus_per_engine: int | None = Field(None, gt=0)
    server_groups: list[Group] = Field(min_length=1, validation_alias=AliasChoices("server_groups", "engine_groups"))


class ServerFile(BaseModel):
    sglang: list[Model]


def server_groups(translation: Translation) -> None:
    file = translation.take(FLAG)
    if file is None:
        return
    if translation.engine != "sglang":
        translation.note(FLAG, f'servers of SGLang; the engine is "{translation.engine}"')
        return
    try:
        models = ServerFile.model_validate(yaml.safe_load(Path(file).read_text(encoding="utf-8"))).sglang
    except (OSError, UnicodeError, yaml.YAMLError, ValidationError) as error:
        reason = " ".join(str(error).split())
        translation.note(
            FLAG, f"{file}: cannot be read: {reason}. Write its groups into the tables engine and launcher"
        )
        return
    hf = translation.given.get("hf-checkpoint", [""])[-1]
    for model in models:
        path = model.model_path or hf
        if path == hf if model.update_weights is None else model.update_weights:
            of_policy(translation, file, model)
        elif model.name in SERVED:
            of_other(translation, file, model, path)
        else:
            known = " and ".join(f"engines.{name}" for name in SERVED)
            translation.note(
                FLAG,
                f"{file}: model {model.name}: only {known} are served beside the trained model. Start its server yourself",
            )


def of_policy(translation: Translation, file: str, model: Model) -> None:
    """Engines of the trained model: all regular, or pairs of prefill and decode."""
    groups = model.server_groups
    default = size_by_default(translation, model)
    sizes = {group.num_gpus_per_engine or default for group in groups}
    by_kind = {group.worker_type: group for group in groups}
    problem = problem_of(groups, sizes)
    if problem is not None:
        put_devices(translation, sum(group.num_gpus for group in groups if group.worker_type in KINDS) or 1, default)
        translation.note(FLAG, f"{file}: {problem}. The run file has engines without these groups")
        return
    (size,) = sizes
    if "regular" in by_kind:
        put_devices(translation, groups[0].num_gpus, size)
        for name, value in groups[0].overrides.items():
            translation.done.add(f"sglang-{name.replace('_', '-')}")
            translation.put(f"engine.{name}", value)
        return
    prefill, decode = (by_kind[kind].num_gpus // size for kind in ("prefill", "decode"))
    # As many engines as there are equal sets of servers: an engine with several servers has to be on one machine.
    engines = gcd(prefill, decode)
    servers = (prefill + decode) // engines
    put_devices(translation, engines * servers * size, servers * size)
    translation.put("engine.servers", servers)
    translation.put("engine.prefill_servers", prefill // engines)
    for kind, group in by_kind.items():
        if group.overrides:
            translation.put(f"engine.{kind}_options", group.overrides)
    if "router-policy" not in translation.given:
        # sglang-router's own default.
        translation.put("engine.router_policy", "cache_aware")


def problem_of(groups: Sequence[Group], sizes: set[int]) -> str | None:
    """Why these groups are not translated. `sizes`: the numbers of GPUs of their servers."""
    kinds = [group.worker_type for group in groups]
    if other := sorted(set(kinds) - set(KINDS)):
        return f"worker_type {', '.join(other)}: only {', '.join(KINDS)} are started"
    if sorted(kinds) not in (["regular"], ["decode", "prefill"]):
        return f"groups {', '.join(kinds)}: only one regular group, or one of prefill and one of decode, is translated"
    if len(sizes) > 1:
        return f"num_gpus_per_engine {sorted(sizes)}: servers of one engine have equal shares of its devices"
    (size,) = sizes
    if uneven := [group.num_gpus for group in groups if group.num_gpus % size]:
        return f"num_gpus {uneven[0]} is not a multiple of num_gpus_per_engine {size}"
    return None


def of_other(translation: Translation, file: str, model: Model, path: str) -> None:
    """Engines of a model that is served and not trained."""
    groups = model.server_groups
    if [group.worker_type for group in groups] != ["regular"]:
        translation.note(FLAG, f"{file}: model {model.name}: only one regular group is translated")
        return
    size = groups[0].num_gpus_per_engine or size_by_default(translation, model)
    row: dict[str, Any] = {"load": path, "num_gpus": groups[0].num_gpus, "num_gpus_per_engine": size}
    if groups[0].overrides:
        row["engine"] = {"name": "sglang", **groups[0].overrides}
    translation.put(f"engines.{model.name}", row)


def size_by_default(translation: Translation, model: Model) -> int:
    """GPUs of a server whose group names none."""
    return model.num_gpus_per_engine or translation.number("rollout-num-gpus-per-engine", int, None) or 1


def put_devices(translation: Translation, count: int, of_engine: int) -> None:
    for flag, value in (("rollout-num-gpus", count), ("rollout-num-gpus-per-engine", of_engine)):
        translation.done.add(flag)
        translation.put(f"launcher.{flag.replace('-', '_')}", value)
