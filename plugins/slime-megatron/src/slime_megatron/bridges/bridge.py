"""Bridge: one model family. Entry points of the group `slime_megatron.bridges` name bridges by `model_type`."""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slime_core.errors import ModelError
from slime_megatron.bridges.weight import GateUp, Plain, Qkv, Weight

LAYER: Final = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")
PREDICTION: Final = re.compile(r"^mtp\.layers\.(\d+)\.(.*)$")
OF_PREDICTION: Final = "transformer_layer."
EXPERT: Final = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.*)$")


@dataclass(frozen=True, kw_only=True, eq=False)
class Rotary:
    inv_freq: Tensor
    """(D / 2,) float32"""
    factor: float = 1.0
    """Cosines and sines are multiplied by it (YaRN)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Architecture:
    """A model's shape, for Megatron."""

    options: Mapping[str, Any]
    """Fields of TransformerConfig."""
    vocab_size: int
    max_length: int
    tied: bool
    """Embedding and head share one weight."""
    padding: int | None
    """Token whose embedding is not trained, the same as in transformers."""
    rotary: Rotary
    mla: bool = False
    sandwich_norms: bool = False
    """A norm also follows attention and MLP, before the residual is added."""
    joint_qk_norm: bool = False
    """Queries are normed over all heads together, and so are keys; not each head."""
    choosers: tuple[int, ...] = ()
    """For each layer, the number (from 1) of the one that chooses its keys; empty: attention is dense."""
    interleaved_indexer: bool = False
    """The indexer rotates pairs of neighbouring features."""


@dataclass(frozen=True, kw_only=True)
class Bridge(ABC):
    """Subclasses define `architecture` and their names; code that most decoders share is here."""

    config_type: ClassVar[str | None] = None
    """model_type of the config class in transformers; None: the folder's own."""

    config: PreTrainedConfig
    """Of the language model."""
    tensors: frozenset[str] = frozenset()
    """Names of the folder's tensors; empty: the folder has no weights."""
    ignored: ClassVar[tuple[str, ...]] = (r"rotary_emb\.inv_freq$",)
    """Regular expressions: names of a folder's tensors that are not loaded. `{layers_behind}` is replaced by the numbers of the
    layers of multi-token prediction."""
    towers: ClassVar[tuple[str, ...]] = ()
    """Prefixes of the tensors of a folder's other models, which text does not reach. They are saved unchanged."""
    predictions_key: ClassVar[str] = "num_nextn_predict_layers"
    """Key of config.json for the number of layers of multi-token prediction."""
    expert_prefix: ClassVar[str] = "mlp.experts."
    """Prefix of the numbers of experts, in a layer of the folder."""

    most_predictions: ClassVar[int] = sys.maxsize
    """Most layers of multi-token prediction whose tensors a folder of this family can name."""
    layer_kinds: ClassVar[frozenset[str]] = frozenset({"full_attention"})
    """The values of layer_types in config.json that the backend computes."""

    @abstractmethod
    def architecture(self) -> Architecture: ...

    def layer_weights(self) -> Mapping[str, Weight]:
        """Keys: names in a layer of Megatron. Names in the folder follow `prefix` and `layers.N.`."""
        return {**self.norms(), **self.attention(), **self.dense_mlp("mlp")}

    def expert_weights(self) -> Mapping[str, Weight]:
        """Keys: names in an expert. Names in the folder follow those of its layer, `expert_prefix` and its number."""
        return {
            "linear_fc1.weight": GateUp(names=("gate_proj.weight", "up_proj.weight")),
            "linear_fc2.weight": Plain(names=("down_proj.weight",)),
        }

    def prediction_weights(self) -> Mapping[str, Weight]:
        """Weights of a layer of multi-token prediction, without those of its decoder layer. Names in the folder follow the
        first of `prediction_prefixes`. Empty if the backend does not compute such layers for this family."""
        return {}

    def prediction_prefixes(self, number: int) -> tuple[str, str]:
        """Prefixes in the folder of the names of such a layer (counted from 0) and of its decoder layer."""
        prefix = f"{self.prefix}layers.{self.config.num_hidden_layers + number}."
        return prefix, prefix

    @property
    def prefix(self) -> str:
        """Prefix of the decoder's names in the folder."""
        return "model."

    def outer_weights(self) -> Mapping[str, Weight]:
        return {
            "embedding.word_embeddings.weight": Plain(names=(f"{self.prefix}embed_tokens.weight",)),
            "decoder.final_layernorm.weight": Plain(names=(f"{self.prefix}norm.weight",)),
            "output_layer.weight": Plain(names=("lm_head.weight",)),
            "value_head.weight": Plain(names=("score.weight",)),
            "value_head.bias": Plain(names=("score.bias",)),
        }

    def norms(self) -> dict[str, Weight]:
        return {
            "input_layernorm.weight": Plain(names=("input_layernorm.weight",)),
            "pre_mlp_layernorm.weight": Plain(names=("post_attention_layernorm.weight",)),
        }

    def attention(self) -> dict[str, Weight]:
        return {
            "self_attention.linear_qkv.weight": self.qkv("weight"),
            "self_attention.linear_qkv.bias": self.qkv("bias"),
            "self_attention.linear_proj.weight": Plain(names=("self_attn.o_proj.weight",)),
            "self_attention.linear_proj.bias": Plain(names=("self_attn.o_proj.bias",)),
            "self_attention.q_layernorm.weight": Plain(names=("self_attn.q_norm.weight",)),
            "self_attention.k_layernorm.weight": Plain(names=("self_attn.k_norm.weight",)),
        }

    def qkv(self, kind: str) -> Qkv:
        config = self.config
        return Qkv(
            names=tuple(f"self_attn.{part}_proj.{kind}" for part in "qkv"),
            groups=config.num_key_value_heads,
            queries_per_group=config.num_attention_heads // config.num_key_value_heads,
            head_dim=self.head_dim,
        )

    def dense_mlp(self, theirs: str, ours: str = "mlp") -> dict[str, Weight]:
        return {
            f"{ours}.linear_fc1.weight": GateUp(names=(f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight")),
            f"{ours}.linear_fc2.weight": Plain(names=(f"{theirs}.down_proj.weight",)),
        }

    def weight(self, name: str) -> Weight:
        """The weight of a parameter of Megatron, by its name in the whole model."""
        prefix, weights, short = "", self.outer_weights(), name
        if found := PREDICTION.match(name):
            prefix, of_layer = self.prediction_prefixes(int(found[1]))
            weights, short = self.prediction_weights(), found[2]
            if int(found[1]) >= self.most_predictions:
                raise ModelError(f"backend.mtp_num_layers: this family has at most {self.most_predictions} of them.")
            if not weights:
                raise ModelError(
                    "backend.mtp_num_layers: backend megatron does not train this family's layers of multi-token prediction. "
                    "Leave it out."
                )
            if short.startswith(OF_PREDICTION):
                prefix, weights, short = of_layer, self.layer_weights(), short.removeprefix(OF_PREDICTION)
        elif found := LAYER.match(name):
            prefix, weights, short = f"{self.prefix}layers.{found[1]}.", self.layer_weights(), found[2]
        if expert := EXPERT.match(short):
            prefix, weights, short = f"{prefix}{self.expert_prefix}", self.experts_at(prefix, int(expert[1])), expert[2]
        if short not in weights:
            raise ModelError(f"{type(self).__name__}: Megatron has a weight {name} that this bridge has no names for.")
        weight = weights[short]
        return placed(weight, prefix)

    def experts_at(self, layer: str, number: int) -> Mapping[str, Weight]:
        """Keys: names in an expert. Names in the folder follow `expert_prefix`. `layer`: the prefix of its layer."""
        return {name: placed(weight, f"{number}.") for name, weight in self.expert_weights().items()}

    def ignores(self, name: str) -> bool:
        """Whether a folder may have this tensor although it is not loaded."""
        last = self.config.num_hidden_layers
        behind = range(last, last + max(1, getattr(self.config, self.predictions_key, None) or 0))
        layers = f"(?:{'|'.join(map(str, behind))})"
        if name.startswith(self.towers):
            return True
        patterns = [pattern.replace("{layers_behind}", layers) for pattern in self.ignored]
        if self.config.tie_word_embeddings:
            patterns.append(r"^lm_head\.weight$")
        return any(re.search(pattern, name) for pattern in patterns)

    @property
    def head_dim(self) -> int:
        given = getattr(self.config, "head_dim", None)
        return int(given or self.config.hidden_size // self.config.num_attention_heads)

    def common_options(self) -> dict[str, Any]:
        """Options of decoders with RMSNorm, gated SiLU and grouped queries."""
        config = self.config
        if config.hidden_act != "silu":
            raise ModelError(
                f"hidden_act = {config.hidden_act} in the model's config.json: backend megatron computes only silu."
            )
        if getattr(config, "use_sliding_window", False) or any(
            kind not in self.layer_kinds for kind in getattr(config, "layer_types", None) or ()
        ):
            raise ModelError(
                "the model has layers that are not full attention: backend megatron does not compute them for this family."
            )
        return {
            "num_layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            # A config without it is of a model whose layers all have experts.
            "ffn_hidden_size": getattr(config, "intermediate_size", None) or config.moe_intermediate_size,
            "num_attention_heads": config.num_attention_heads,
            "num_query_groups": config.num_key_value_heads,
            "kv_channels": self.head_dim,
            "normalization": "RMSNorm",
            "layernorm_epsilon": config.rms_norm_eps,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "add_bias_linear": False,
        }

    def common_architecture(self, options: Mapping[str, Any], **more: Any) -> Architecture:
        rotary = self.rotary()
        if rotary.factor != 1.0 and not more.get("mla"):
            if 2 * len(rotary.inv_freq) != self.head_dim:
                raise ModelError(
                    "the model scales a part of its rotary embedding: backend megatron does not compute it."
                )
            # Queries and keys are both multiplied by it.
            options = {**options, "softmax_scale": rotary.factor**2 * self.head_dim**-0.5}
            rotary = Rotary(inv_freq=rotary.inv_freq)
        return Architecture(
            options=options,
            vocab_size=self.config.vocab_size,
            max_length=self.config.max_position_embeddings,
            tied=bool(self.config.tie_word_embeddings),
            padding=getattr(self.config, "pad_token_id", None),
            rotary=rotary,
            **more,
        )

    def rotary(self) -> Rotary:
        parameters = self.config.rope_parameters
        kind = parameters.get("rope_type", "default")
        if kind != "default":
            if kind not in ROPE_INIT_FUNCTIONS or kind in ("dynamic", "longrope"):
                raise ModelError(
                    f"rope_type = {kind} in the model's config.json: backend megatron does not compute it."
                )
            inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](self.config, torch.device("cpu"))
            return Rotary(inv_freq=inv_freq.float(), factor=float(factor))
        dim = int(self.rotary_head_dim * parameters.get("partial_rotary_factor", 1.0))
        # In float32, the same as in transformers.
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return Rotary(inv_freq=1.0 / (parameters["rope_theta"] ** exponents))

    @property
    def rotary_head_dim(self) -> int:
        return self.head_dim


@dataclass(frozen=True, kw_only=True)
class Moe:
    """Options of mixtures of experts, from a config."""

    config: PreTrainedConfig
    first_dense: int = 0
    width: int | None = None
    """Features of an expert; None: the config's moe_intermediate_size."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def all_options(self, num_experts: int) -> dict[str, Any]:
        layers = self.config.num_hidden_layers
        return {
            "num_moe_experts": num_experts,
            "moe_ffn_hidden_size": self.width or self.config.moe_intermediate_size,
            "moe_router_topk": self.config.num_experts_per_tok,
            "moe_layer_freq": [int(layer >= self.first_dense) for layer in range(layers)],
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_bias_update_rate": 0.0,
            "moe_router_dtype": "fp32",
            **self.options,
        }


def deepseek_prediction_weights() -> dict[str, Weight]:
    """DeepSeek-V3's names, which GLM-4.5 shares."""
    return {
        "enorm.weight": Plain(names=("enorm.weight",)),
        "hnorm.weight": Plain(names=("hnorm.weight",)),
        "eh_proj.weight": Plain(names=("eh_proj.weight",)),
        "final_layernorm.weight": Plain(names=("shared_head.norm.weight",)),
    }


def placed(weight: Weight, prefix: str) -> Weight:
    return replace(weight, names=tuple(prefix + name for name in weight.names))


def sigmoid_routing(config: PreTrainedConfig, num_experts: int) -> dict[str, Any]:
    """Options of DeepSeek-V3's routing: sigmoid scores, a bias that is used only for the choice, groups of experts (arXiv
    2412.19437, section 2.1.2)."""
    if not config.norm_topk_prob:
        raise ModelError(
            "norm_topk_prob = false in the model's config.json: backend megatron does not compute it with sigmoid scores."
        )
    options: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
    }
    if config.n_group > 1:
        if config.num_experts_per_tok // config.topk_group != 2:
            raise ModelError(
                f"num_experts_per_tok = {config.num_experts_per_tok} and topk_group = {config.topk_group} in the "
                "model's config.json: Megatron ranks groups by as many experts as their ratio, the model by two."
            )
        options |= {"moe_router_num_groups": config.n_group, "moe_router_group_topk": config.topk_group}
    if config.n_shared_experts:
        options["moe_shared_expert_intermediate_size"] = config.n_shared_experts * config.moe_intermediate_size
    return options


def sigmoid_moe_weights() -> dict[str, Weight]:
    return {
        "mlp.router.weight": Plain(names=("mlp.gate.weight",)),
        "mlp.router.expert_bias": Plain(names=("mlp.gate.e_score_correction_bias",)),
        "mlp.shared_experts.linear_fc1.weight": GateUp(
            names=("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight")
        ),
        "mlp.shared_experts.linear_fc2.weight": Plain(names=("mlp.shared_experts.down_proj.weight",)),
    }


def choosers_of(kinds: Sequence[str]) -> tuple[int, ...]:
    """Numbers, from 1, of the layers whose choice each layer uses. `kinds`: "full" or "shared"."""
    found: list[int] = []
    for number, kind in enumerate(kinds, 1):
        found.append(found[-1] if kind == "shared" and found else number)
    return tuple(found)
