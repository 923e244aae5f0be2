"""The options of SGLang's ServerArgs, read from its source: importing it takes seconds, and it may be in another interpreter.

options.json has those of the version that this plugin was tested with, for machines without SGLang:
`python -m slime_sglang.server_args FOLDER_OF_SGLANG > options.json` writes it.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from slime_serving.option_types import type_of
from slime_sglang.option_choices import Choices, NamedLists, constants, literals, may_be_extended

OWNED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "model_path": "model.hf_checkpoint, or model.rollout_load",
        "tokenizer_path": "model.hf_checkpoint",
        "served_model_name": "model.hf_checkpoint",
        "trust_remote_code": "model.trust_remote_code",
        "random_seed": "seed",
        "device": "launcher.device",
        "tp_size": "launcher.rollout_num_gpus_per_engine, engine.pp_size and engine.servers",
        "context_length": "the model's max_position_embeddings and rollout.rollout_max_context_len",
        "enable_memory_saver": "launcher.offload_rollout",
        "enable_weights_cpu_backup": "launcher.offload_rollout",
        "host": "the engine: loopback",
        "port": "the engine: a free one",
        "nccl_port": "the engine: a free one",
        "api_key": "the engine: a new one for each start",
        "admin_api_key": "the engine: a new one for each start",
        "weight_version": "the run's weight updates",
        "nnodes": "launcher.num_gpus_per_node",
        "node_rank": "the launcher",
        "dist_init_addr": "the launcher",
        "base_gpu_id": "launcher: the devices of the engine",
        "gpu_id_step": "launcher: the devices of the engine",
        "skip_server_warmup": "the engine",
        "enable_return_routed_experts": "train.use_rollout_routing_replay",
        "enable_deterministic_inference": "engine.deterministic",
        "stream_output": "the engine",
        "enable_lora": "engine.max_adapters",
        "lora_paths": "engine.max_adapters",
        "max_loaded_loras": "engine.max_adapters",
        "max_loras_per_batch": "engine.adapters_at_once",
        "max_lora_rank": "engine.max_adapter_rank",
        "disaggregation_mode": "engine.prefill_servers",
        "disaggregation_bootstrap_port": "the engine: a free one",
    }
)
"""Options that the run decides, and the key that sets each instead."""
RECORD: Final = "ServerArgs"


@dataclass(frozen=True, slots=True)
class ServerOption:
    name: str
    type: Any
    """For pydantic: one of bool, int, float, str, a list of one of them, or Any."""
    doc: str
    choices: Choices = ()
    aliases: tuple[str, ...] = ()
    """Other names of the option on SGLang's command line."""


def installed_folder() -> Path | None:
    """The package of this interpreter; None: it is not installed here."""
    spec = importlib.util.find_spec("sglang")
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def installed_options() -> tuple[ServerOption, ...]:
    """The options of the installed SGLang; those of the tested version if it is not installed here."""
    folder = installed_folder()
    return shipped_options() if folder is None else options_of(folder)


def shipped_options() -> tuple[ServerOption, ...]:
    rows = json.loads((Path(__file__).parent / "options.json").read_text())
    return tuple(
        # Its choices are those of one version: the SGLang that starts the servers is asked for them.
        ServerOption(row["name"], type_of(row["type"]), row["doc"], aliases=tuple(row["aliases"]))
        for row in rows
    )


def options_of(folder: Path) -> tuple[ServerOption, ...]:
    """The options of the SGLang in this folder."""
    srt = folder / "srt"
    record, lists = srt / "server_args.py", srt / "arg_groups" / "choices.py"
    sources = [*sorted((srt / "arg_groups" / "fields").glob("*.py")), record]
    trees = {path: ast.parse(path.read_bytes()) for path in (*sources, lists) if path.is_file()}
    named = NamedLists.of([tree for path, tree in trees.items() if path in (record, lists)], extended=may_be_extended())
    found: dict[str, ServerOption] = {}
    for source in sources:
        if source in trees:
            for option in options_in(trees[source], named, record=RECORD if source == record else None):
                found.setdefault(option.name, option)
    arguments = arguments_in(trees[record], named) if record in trees else []
    return tuple(with_arguments(found, arguments))


def options_in(tree: ast.Module, named: NamedLists, *, record: str | None = None) -> Iterator[ServerOption]:
    """The annotated fields of the classes of a module, or of the one called `record` alone."""
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or (record is not None and node.name != record):
            continue
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                name = statement.target.id
                if not name.startswith("_"):
                    yield option_of(name, statement.annotation, named)


def option_of(name: str, annotation: ast.expr, named: NamedLists) -> ServerOption:
    """`A[TYPE, "help"]`, `A[TYPE, Arg(help="help", choices=..., aliases=...)]` or `TYPE`."""
    doc = ""
    choices: Choices = ()
    aliases: tuple[str, ...] = ()
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name) and annotation.value.id == "A":
        inner = annotation.slice
        if isinstance(inner, ast.Tuple):
            doc = next((text for part in inner.elts[1:] if (text := help_of(part))), "")
            choices = next((known for part in inner.elts[1:] if (known := named.read(keyword_of(part, "choices")))), ())
            given = (keyword_of(part, "aliases") for part in inner.elts[1:])
            aliases = tuple(field_name(alias) for node in given if node is not None for alias in constants(node))
            annotation = inner.elts[0]
    choices = choices or literals(annotation)
    type_ = type_of(ast.unparse(annotation))
    if type_ is str and choices and all(isinstance(choice, int) for choice in choices):
        type_ = int
    return ServerOption(name, type_, doc or "See SGLang's documentation.", choices, aliases)


def arguments_in(tree: ast.Module, named: NamedLists) -> list[tuple[tuple[str, ...], Choices]]:
    """Names and choices of the arguments that are added one by one: all, or those that the dataclass does not describe."""
    return [
        (tuple(names), named.read(keyword_of(node, "choices")))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
        if (names := [field_name(arg.value) for arg in node.args if isinstance(arg, ast.Constant)])
    ]


def with_arguments(
    found: Mapping[str, ServerOption], arguments: Sequence[tuple[tuple[str, ...], Choices]]
) -> Iterator[ServerOption]:
    """The options, completed from their arguments where the dataclass has no value."""
    given = {name: argument for argument in arguments for name in argument[0] if name in found}
    for name, option in found.items():
        names, choices = given.get(name, ((), ()))
        aliases = option.aliases or tuple(other for other in names if other != name)
        yield replace(
            option,
            choices=option.choices or choices,
            aliases=tuple(alias for alias in aliases if alias not in found),
        )


def field_name(flag: object) -> str:
    return str(flag).lstrip("-").replace("-", "_")


def keyword_of(node: ast.expr, name: str) -> ast.expr | None:
    if not isinstance(node, ast.Call):
        return None
    return next((keyword.value for keyword in node.keywords if keyword.arg == name), None)


def help_of(node: ast.expr) -> str:
    node = keyword_of(node, "help") or node
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return " ".join(node.value.split())
    return ""


def type_name(option: ServerOption) -> str:
    """What `type_of` reads."""
    return option.type.__name__ if option.type in (bool, int, float, str) else str(option.type)


if __name__ == "__main__":
    written = [
        {"name": o.name, "type": type_name(o), "doc": o.doc, "aliases": o.aliases}
        for o in options_of(Path(sys.argv[1]))
    ]
    print("[\n" + ",\n".join(map(json.dumps, written)) + "\n]")
