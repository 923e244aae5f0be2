"""The options of vLLM's servers, read from its source: importing it takes seconds, and it may be in another interpreter.

options.json has those of the version that this plugin was tested with, for machines without vLLM:
`python -m slime_vllm.server_args FOLDER_OF_VLLM > options.json` writes it.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from slime_serving.option_types import type_of

OWNED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "model": "model.hf_checkpoint, or model.rollout_load",
        "tokenizer": "model.hf_checkpoint",
        "served_model_name": "model.hf_checkpoint",
        "trust_remote_code": "model.trust_remote_code",
        "seed": "seed",
        "max_model_len": "the model's max_position_embeddings and rollout.rollout_max_context_len",
        "tensor_parallel_size": "launcher.rollout_num_gpus_per_engine, pipeline_parallel_size, data_parallel_size and "
        "engine.servers",
        **dict.fromkeys(
            (
                "data_parallel_rank",
                "data_parallel_start_rank",
                "data_parallel_size_local",
                "data_parallel_address",
                "data_parallel_rpc_port",
                "data_parallel_hybrid_lb",
                "data_parallel_external_lb",
                "data_parallel_multi_port_external_lb",
                "data_parallel_backend",
            ),
            "data_parallel_size; an engine of slime-vllm is on one machine",
        ),
        "nnodes": "the launcher; an engine of slime-vllm is on one machine",
        "node_rank": "the launcher",
        "master_addr": "the launcher",
        "master_port": "the launcher",
        "logprobs_mode": "the engine: processed_logprobs, at the sampling temperature",
        "max_logprobs": "the engine",
        "enable_sleep_mode": "launcher.offload_rollout",
        "worker_extension_cls": "the engine",
        "weight_transfer_config": "sync.transport",
        "enable_lora": 'engine.max_adapters, or sync.transport = "adapter"',
        "max_cpu_loras": "engine.max_adapters",
        "max_loras": "engine.adapters_at_once",
        "max_lora_rank": 'engine.max_adapter_rank, or sync.transport = "adapter" and backend.lora_rank',
    }
)
"""Options that the run decides, and the key that sets each instead."""
CLASSES: Final = ("EngineArgs", "AsyncEngineArgs")


@dataclass(frozen=True, slots=True)
class ServerOption:
    name: str
    kind: str
    """The annotation in vLLM's source."""
    doc: str

    @property
    def type(self) -> Any:
        """For pydantic: one of bool, int, float, str, a list of one of them, or Any."""
        return type_of(self.kind)


def options_in(folder: Path) -> Iterator[ServerOption]:
    """The options of a vLLM in this folder."""
    docs = dict(documented(folder / "config"))
    tree = ast.parse((folder / "engine" / "arg_utils.py").read_bytes())
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or node.name not in CLASSES:
            continue
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                name = statement.target.id
                if not name.startswith("_"):
                    yield ServerOption(
                        name, ast.unparse(statement.annotation), docs.get(source_of(statement.value), "")
                    )


def source_of(default: ast.expr | None) -> str:
    """The field that a default is taken from, as `Class.field`: `ModelConfig.seed`, or `get_field(ModelConfig, "seed")`."""
    if isinstance(default, ast.Call) and len(default.args) == 2 and isinstance(default.args[1], ast.Constant):
        return f"{ast.unparse(default.args[0])}.{default.args[1].value!s}"
    return "" if default is None else ast.unparse(default)


def documented(folder: Path) -> Iterator[tuple[str, str]]:
    """Fields of vLLM's config classes, as `Class.field`, with the first sentence of the text below each."""
    for path in sorted(folder.glob("*.py")):
        for node in ast.parse(path.read_bytes()).body:
            if not isinstance(node, ast.ClassDef):
                continue
            for field, text in zip(node.body, node.body[1:], strict=False):
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(field.target, ast.Name)
                    and isinstance(text, ast.Expr)
                    and isinstance(text.value, ast.Constant)
                    and isinstance(text.value.value, str)
                ):
                    yield (
                        f"{node.name}.{field.target.id}",
                        " ".join(text.value.value.split()).partition(". ")[0].rstrip(".") + ".",
                    )


@cache
def shipped_options() -> tuple[ServerOption, ...]:
    rows = json.loads((Path(__file__).parent / "options.json").read_text())
    return tuple(ServerOption(**row) for row in rows)


if __name__ == "__main__":
    found = [{"name": o.name, "kind": o.kind, "doc": o.doc} for o in options_in(Path(sys.argv[1]))]
    print(json.dumps(found, indent=0))
