"""The options of the installed SGLang's ServerArgs, read from its source: importing it takes seconds."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

OWNED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "model_path": "model.hf_checkpoint",
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
        "weight_version": "the run's publishes",
        "nnodes": "launcher.num_gpus_per_node",
        "node_rank": "the launcher",
        "dist_init_addr": "the launcher",
        "base_gpu_id": "launcher: the devices of the engine",
        "gpu_id_step": "launcher: the devices of the engine",
        "skip_server_warmup": "the engine",
        "enable_return_routed_experts": "train.use_rollout_routing_replay",
        "enable_deterministic_inference": "engine.deterministic",
        "stream_output": "the engine",
        "disaggregation_mode": "engine.prefill_servers",
        "disaggregation_bootstrap_port": "the engine: a free one",
    }
)
"""What a run decides, and where it is said instead."""


@dataclass(frozen=True, slots=True)
class ServerOption:
    name: str
    type: Any
    """For pydantic: one of bool, int, float, str, a list of one of them, or Any."""
    doc: str


def installed_options() -> tuple[ServerOption, ...]:
    """Empty if SGLang is not installed."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return ()
    srt = Path(next(iter(spec.submodule_search_locations))) / "srt"
    sources = [*sorted((srt / "arg_groups" / "fields").glob("*.py")), srt / "server_args.py"]
    found: dict[str, ServerOption] = {}
    for source in sources:
        if source.is_file():
            for option in options_in(ast.parse(source.read_bytes()), of_record=source.name == "server_args.py"):
                found.setdefault(option.name, option)
    return tuple(found.values())


def options_in(tree: ast.Module, *, of_record: bool) -> Iterator[ServerOption]:
    """The annotated fields of the classes of a module; with `of_record` of ServerArgs alone."""
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or (of_record and node.name != "ServerArgs"):
            continue
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                name = statement.target.id
                if not name.startswith("_"):
                    yield option_of(name, statement.annotation)


def option_of(name: str, annotation: ast.expr) -> ServerOption:
    """`A[TYPE, "help"]`, `A[TYPE, Arg(help="help")]` or `TYPE`."""
    doc = ""
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name) and annotation.value.id == "A":
        inner = annotation.slice
        if isinstance(inner, ast.Tuple):
            doc = next((text for part in inner.elts[1:] if (text := help_of(part))), "")
            annotation = inner.elts[0]
    return ServerOption(name, type_of(ast.unparse(annotation)), doc or "See SGLang's documentation.")


def help_of(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        node = next((keyword.value for keyword in node.keywords if keyword.arg == "help"), node)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return " ".join(node.value.split())
    return ""


def type_of(text: str) -> Any:
    """What the command line needs to know of a type; SGLang checks the rest."""
    text = text.strip("'\"")
    for wrapper in ("Optional[", "typing.Optional["):
        if text.startswith(wrapper):
            text = text[len(wrapper) : -1]
    text = text.removesuffix("| None").strip()
    plain: dict[str, Any] = {"bool": bool, "int": int, "float": float, "str": str}
    if text in plain:
        return plain[text]
    if text.startswith(("List[", "list[")):
        return list[plain.get(text[5:-1], Any)]  # type: ignore[misc]
    if text.startswith("Literal["):
        return str
    return Any
