"""Options of the installed Megatron, read from its source: importing it takes seconds and imports torch.

They are the fields of its records for models, optimizers and data parallelism, with the text under each.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

MODEL: Final = "model"
OPTIMIZER: Final = "optimizer"
DATA_PARALLEL: Final = "data_parallel"

RECORDS: Final[Mapping[str, tuple[tuple[str, tuple[str, ...]], ...]]] = MappingProxyType(
    {
        MODEL: (
            ("model_parallel_config.py", ("ModelParallelConfig",)),
            ("transformer/transformer_config.py", ("TransformerConfig", "MLATransformerConfig")),
        ),
        OPTIMIZER: (
            ("optimizer/optimizer_config.py", ("OptimizerConfig", "AdamOptimizerConfig", "SGDOptimizerConfig")),
        ),
        DATA_PARALLEL: (("distributed/distributed_data_parallel_config.py", ("DistributedDataParallelConfig",)),),
    }
)
"""Files under megatron/core and their classes, by the record of the options."""

SHAPE: Final = "the model's config.json"
OWNED: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "num_layers",
                "hidden_size",
                "num_attention_heads",
                "num_query_groups",
                "ffn_hidden_size",
                "kv_channels",
                "normalization",
                "layernorm_epsilon",
                "add_bias_linear",
                "add_qkv_bias",
                "gated_linear_unit",
                "num_moe_experts",
                "moe_ffn_hidden_size",
                "moe_layer_freq",
                "moe_router_topk",
                "moe_router_score_function",
                "moe_router_pre_softmax",
                "moe_router_enable_expert_bias",
                "moe_router_num_groups",
                "moe_router_group_topk",
                "moe_router_topk_scaling_factor",
                "moe_shared_expert_intermediate_size",
                "qk_layernorm",
                "multi_latent_attention",
                "dsa_indexer_n_heads",
                "dsa_indexer_head_dim",
                "dsa_indexer_topk",
                "q_lora_rank",
                "kv_lora_rank",
                "qk_head_dim",
                "qk_pos_emb_head_dim",
                "v_head_dim",
                "rope_type",
                "rotary_base",
                "rotary_percent",
                "rotary_interleaved",
                "rotary_scaling_factor",
                "original_max_position_embeddings",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "softmax_scale",
                "layernorm_zero_centered_gamma",
                "attention_output_gate",
                "moe_shared_expert_gate",
                "experimental_attention_variant",
                "linear_attention_freq",
                "linear_conv_kernel_dim",
                "linear_key_head_dim",
                "linear_value_head_dim",
                "linear_num_key_heads",
                "linear_num_value_heads",
                "window_size",
                "window_attn_skip_freq",
            ),
            SHAPE,
        ),
        "dsa_indexer_loss_coeff": "the backend: indexers are not trained",
        "dsa_indexer_use_sparse_loss": "the backend: indexers are not trained",
        "params_dtype": "backend.bf16 and backend.fp16",
        "pipeline_dtype": "backend.bf16 and backend.fp16",
        "autocast_dtype": "backend.bf16 and backend.fp16",
        "enable_autocast": "backend.bf16 and backend.fp16",
        "calculate_per_token_loss": "the algorithm's aggregation (algo.calculate_per_token_loss)",
        "variable_seq_lengths": "the backend: micro-batches are packed",
        "use_cpu_initialization": "the backend: weights come from the model folder",
        "perform_initialization": "the backend: weights come from the model folder",
        "deterministic_mode": "the run",
        "average_in_collective": "the backend: gradients are summed",
        "use_megatron_fsdp": "the choice of backend",
        "use_custom_fsdp": "the choice of backend",
        "hidden_dropout": "the backend: dropout is off",
        "attention_dropout": "the backend: dropout is off",
        "attention_backend": "the backend: packed attention of its own",
        "moe_enable_routing_replay": "train.use_routing_replay and train.use_rollout_routing_replay",
        "overlap_param_gather": "the backend: the head runs outside of the modules that would wait for it",
        "overlap_param_gather_with_optimizer_step": "the backend, as overlap_param_gather",
        "lr": "train.lr",
        "min_lr": "train.min_lr",
        "weight_decay": "train.weight_decay",
        "adam_beta1": "train.adam_beta1",
        "adam_beta2": "train.adam_beta2",
        "adam_eps": "train.adam_eps",
        "clip_grad": "train.clip_grad",
        "optimizer": "train.optimizer",
    }
)
"""Options of Megatron that slime sets from the run, and the key to set instead."""

NOT_IN_RUN_FILES: Final = frozenset({"Callable", "dtype", "ProcessGroup", "RecipeConfig", "QuantRecipe", "Timers"})
"""A field whose type names one of these cannot be set in a run file."""


@dataclass(frozen=True, slots=True)
class MegatronOption:
    name: str
    type: Any
    """Type for pydantic: bool, int, float, str, a Literal of them, a list of one of them, or Any."""
    doc: str
    of: str
    """MODEL, OPTIMIZER or DATA_PARALLEL; an option of several records is set in each of them."""


def megatron_folder() -> Path | None:
    """Folder of Megatron-core; None if it is not installed."""
    # Not find_spec("megatron.core"): it would import the namespace that other distributions share.
    spec = importlib.util.find_spec("megatron")
    places = [] if spec is None else [Path(place) / "core" for place in spec.submodule_search_locations or ()]
    return next((place for place in places if (place / "package_info.py").is_file()), None)


@cache
def installed_options() -> tuple[MegatronOption, ...]:
    """Options of the installed Megatron-core; empty if it is not installed."""
    folder = megatron_folder()
    if folder is None:
        return ()
    found: dict[tuple[str, str], MegatronOption] = {}
    for of, sources in RECORDS.items():
        for file, classes in sources:
            path = folder / file
            if path.is_file():
                for option in options_in(ast.parse(path.read_bytes()), classes, of):
                    found[option.of, option.name] = option
    return tuple(found.values())


def options_in(tree: ast.Module, classes: tuple[str, ...], of: str) -> Iterator[MegatronOption]:
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or node.name not in classes:
            continue
        for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            name, text = statement.target.id, ast.unparse(statement.annotation)
            if name.startswith("_") or any(word in text for word in NOT_IN_RUN_FILES) or "ClassVar" in text:
                continue
            yield MegatronOption(name, type_of(text), doc_of(following), of)


def doc_of(statement: ast.stmt | None) -> str:
    value = statement.value if isinstance(statement, ast.Expr) else None
    text = value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
    return " ".join(text.split()) or "See Megatron's documentation."


def type_of(text: str) -> Any:
    """The type and listed values, as far as the command line requires them; Megatron checks the rest."""
    text = text.strip("'\"").removesuffix("| None").strip()
    if text.startswith("Optional[") and text.endswith("]"):
        text = text[len("Optional[") : -1]
    plain: dict[str, Any] = {"bool": bool, "int": int, "float": float, "str": str}
    if text in plain:
        return plain[text]
    if text.startswith(("List[", "list[")):
        return list[plain.get(text[5:-1], Any)]  # type: ignore[misc]
    if text.startswith("Literal["):
        return Literal[ast.literal_eval(f"({text[len('Literal[') : -1]},)")]
    return Any
