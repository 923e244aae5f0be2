"""Gated delta nets between layers of gated attention, with experts: Qwen3-Next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slime_megatron.bridges.bridge import Architecture, Bridge
from slime_megatron.bridges.experts import softmax_experts
from slime_megatron.bridges.weight import ByHead, GatedQkv, GateUp, Plain, Weight


@dataclass(frozen=True, kw_only=True)
class Qwen3Next(Bridge):
    ignored = (*Bridge.ignored, r"^mtp\.")
    most_predictions = 1
    layer_kinds = frozenset({"full_attention", "linear_attention"})

    def architecture(self) -> Architecture:
        config = self.config
        moe = softmax_experts(config, "qwen3_next")
        options = {
            **self.common_options(),
            "qk_layernorm": True,
            "layernorm_zero_centered_gamma": True,
            "attention_output_gate": True,
            **moe.all_options(config.num_experts),
            "moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size,
            "moe_shared_expert_gate": True,
            "linear_attention_freq": [int(kind == "linear_attention") for kind in config.layer_types],
            "linear_conv_kernel_dim": config.linear_conv_kernel_dim,
            "linear_key_head_dim": config.linear_key_head_dim,
            "linear_value_head_dim": config.linear_value_head_dim,
            "linear_num_key_heads": config.linear_num_key_heads,
            "linear_num_value_heads": config.linear_num_value_heads,
        }
        return self.common_architecture(options)

    def layer_weights(self) -> Mapping[str, Weight]:
        shared = "mlp.shared_expert"
        return {
            **self.norms(),
            **self.attention(),
            **self.delta_net(),
            "mlp.router.weight": Plain(names=("mlp.gate.weight",)),
            "mlp.shared_experts.linear_fc1.weight": GateUp(
                names=(f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight")
            ),
            "mlp.shared_experts.linear_fc2.weight": Plain(names=(f"{shared}.down_proj.weight",)),
            "mlp.shared_experts.gate_weight": Plain(names=("mlp.shared_expert_gate.weight",)),
        }

    def prediction_weights(self) -> Mapping[str, Weight]:
        return {
            "enorm.weight": Plain(names=("pre_fc_norm_embedding.weight",)),
            "hnorm.weight": Plain(names=("pre_fc_norm_hidden.weight",)),
            "eh_proj.weight": Plain(names=("fc.weight",)),
            "final_layernorm.weight": Plain(names=("norm.weight",)),
        }

    def prediction_prefixes(self, number: int) -> tuple[str, str]:
        return "mtp.", f"mtp.layers.{number}."

    def qkv(self, kind: str) -> GatedQkv:
        plain = super().qkv(kind)
        return GatedQkv(
            names=plain.names,
            groups=plain.groups,
            queries_per_group=plain.queries_per_group,
            head_dim=plain.head_dim,
        )

    def delta_net(self) -> dict[str, Weight]:
        config = self.config
        heads, keys = config.linear_num_key_heads, config.linear_key_head_dim
        repeats = config.linear_num_value_heads // heads
        values = repeats * config.linear_value_head_dim

        def by_head(*names: str, sections: tuple[tuple[int, ...], ...]) -> ByHead:
            return ByHead(names=tuple(f"linear_attn.{name}.weight" for name in names), heads=heads, sections=sections)

        # The projections already hold a head's rows together, the convolution does not.
        return {
            "self_attention.in_proj.weight": by_head(
                "in_proj_qkvz", "in_proj_ba", sections=((2 * keys + 2 * values,), (2 * repeats,))
            ),
            "self_attention.conv_weight": by_head("conv1d", sections=((keys, keys, values),)),
            "self_attention.dt_bias": Plain(names=("linear_attn.dt_bias",)),
            "self_attention.A_log": Plain(names=("linear_attn.A_log",)),
            "self_attention.norm.weight": Plain(names=("linear_attn.norm.weight",)),
            "self_attention.out_proj.weight": Plain(names=("linear_attn.out_proj.weight",)),
        }
