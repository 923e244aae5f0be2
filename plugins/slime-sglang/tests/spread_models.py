# ruff: noqa: E402 - what is stubbed must be so before SGLang is imported
"""Builds and loads models of SGLang for each rank of a server, one rank after the other in this process: `spread_models.py
FOLDER`. For each layout prints a line of JSON: the check's result for loaded weights, and for each parameter of each rank
after one element of it was changed. It runs in its own process, since SGLang is imported with stubs."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from slime_sglang.server.stubs import install_stubs

install_stubs()

import torch
from safetensors.torch import load_file
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
from sglang.srt.distributed import (
    init_distributed_environment,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from sglang.srt.eplb.expert_location import ExpertLocationMetadata, set_global_expert_location_metadata
from sglang.srt.models.deepseek_v2 import DeepseekV3ForCausalLM
from sglang.srt.models.mixtral import MixtralForCausalLM
from sglang.srt.models.qwen2_moe import Qwen2MoeForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM
from sglang.srt.runtime_context import get_context, get_parallel
from transformers import AutoConfig, AutoModelForCausalLM

from slime_sglang.server.checksum import checksum_of_weights, places_of_weights
from slime_sglang.server.loading import apply
from slime_sglang.server.shard_actions import DIGESTS, PARTS, REFUSED, SKIPPED
from slime_transports.delta_code import compare
from slime_transports.equality import Digests
from slime_transports.flattened_bucket import flat_buckets, flatten
from slime_transports.folder import FileEntry
from slime_transports.places import Place
from slime_transports.server_shards import ServerShards

SMALL = {
    "vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "head_dim": 4,
    "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_shared_experts": 2, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "num_nextn_predict_layers": 0,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64},
}  # fmt: skip
SAME = (
    "model.norm", "model.layers.0.self_attn.q_a_proj", "model.layers.0.self_attn.v_proj", "model.layers.1.mlp.experts.1.",
    "model.layers.1.self_attn.kv_a_proj_with_mqa",
)  # fmt: skip
"""Before names of what a delta leaves alone."""
BUCKET = 1024
"""Bytes: many, also within a layer."""


@dataclass(frozen=True)
class Layout:
    model: type
    family: str
    config: dict
    attention: int = 2
    """Ranks that share attention; the others of two have all of it."""
    experts: int = 1
    """Ranks that share the experts; the others of two share the width of each."""
    ranks: int = 2
    padded: bool = False
    """Whether sizes are padded, as on a CPU."""
    fused: bool = False
    """Shared experts among the others."""
    moved: tuple = ()
    """Which expert each place has, where they are not in order."""

    def of(self, rank):
        attention, experts, size = min(self.attention, self.ranks), self.experts, self.ranks
        return {
            "tp_rank": rank, "tp_size": size, "attn_dp_rank": 0, "attn_dp_size": 1,
            "attn_tp_rank": rank % attention, "attn_tp_size": attention,
            "moe_ep_rank": rank * experts // size, "moe_ep_size": experts,
            "moe_tp_rank": rank % (size // experts), "moe_tp_size": size // experts,
        }  # fmt: skip


LAYOUTS = {
    "dense": Layout(Qwen3ForCausalLM, "qwen3", SMALL),
    "biases": Layout(Qwen3ForCausalLM, "qwen3", SMALL | {"attention_bias": True}),
    "replicated": Layout(Qwen3ForCausalLM, "qwen3", SMALL | {"num_key_value_heads": 1}),
    "four": Layout(Qwen3ForCausalLM, "qwen3", SMALL, attention=4, ranks=4),
    "padded": Layout(
        Qwen3ForCausalLM, "qwen3", SMALL | {"num_key_value_heads": 3, "num_attention_heads": 6, "intermediate_size": 40},
        padded=True,
    ),
    "experts-cut": Layout(Qwen3MoeForCausalLM, "qwen3_moe", SMALL | MIXTURE),
    "experts-spread": Layout(Qwen3MoeForCausalLM, "qwen3_moe", SMALL | MIXTURE, experts=2),
    "experts-moved": Layout(
        Qwen3MoeForCausalLM, "qwen3_moe", SMALL | MIXTURE, experts=2, moved=((3, 1, 1, 2, 0, 1), (0, 1, 2, 3, 0, 1)),
    ),
    "experts-padded": Layout(
        Qwen2MoeForCausalLM, "qwen2_moe",
        SMALL | MIXTURE | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}, padded=True,
    ),
    "mixtral": Layout(MixtralForCausalLM, "mixtral", SMALL | {"num_local_experts": 4, "intermediate_size": 40}, padded=True),
    "latent": Layout(DeepseekV3ForCausalLM, "deepseek_v3", SMALL | LATENT),
    "latent-fused": Layout(DeepseekV3ForCausalLM, "deepseek_v3", SMALL | LATENT | {"n_shared_experts": 1}, fused=True),
    "latent-whole": Layout(DeepseekV3ForCausalLM, "deepseek_v3", SMALL | LATENT, ranks=1),
    "latent-padded": Layout(
        DeepseekV3ForCausalLM, "deepseek_v3", SMALL | LATENT | {"moe_intermediate_size": 24, "q_lora_rank": 20}, padded=True
    ),
    "latent-without-q": Layout(DeepseekV3ForCausalLM, "deepseek_v3", SMALL | LATENT | {"q_lora_rank": None}),
    "attention-whole": Layout(DeepseekV3ForCausalLM, "deepseek_v3", SMALL | LATENT, attention=1, experts=2),
}  # fmt: skip


def files_of(layout, folder):
    """Tensors as files have them, without a zero."""
    config = AutoConfig.for_model(layout.family, **layout.config)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape) + 3)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def loaded(layout, folder, tensors):
    config = AutoConfig.from_pretrained(folder)
    if layout.padded:
        config = adjust_config_with_unaligned_cpu_tp(
            ModelConfig(str(folder), dtype="bfloat16"), LoadConfig(), layout.ranks
        ).hf_config
    model = layout.model(config)
    for bucket in flat_buckets(({name: tensor} for name, tensor in tensors.items()), BUCKET):
        model.load_weights(list(bucket.tensors()))
    return model


def held_by(models, action):
    ranks = {}
    for rank, model in enumerate(models):
        given = places_of_weights(model, action, ranks=len(models))
        if REFUSED in given:
            raise NotImplementedError(given[REFUSED])
        ranks[rank] = {Place.parse(key): digest for key, digest in given.items() if key != SKIPPED}
    return ServerShards(ranks=ranks)


def after_delta(models, tensors):
    """Differences after a delta that changes one element of each tensor, except for `SAME`."""
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, tensor in changed.items():
        if not name.startswith(SAME):
            tensor.view(-1)[-1] += 1
    before, after = (
        list(flat_buckets(({name: tensor} for name, tensor in own.items()), BUCKET)) for own in (tensors, changed)
    )
    entries = [
        FileEntry(
            file="none", names=bucket.names, checksum="", nbytes=0, shapes=bucket.shapes,
            dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in bucket.dtypes),
        )
        for bucket in after
    ]  # fmt: skip
    deltas = [compare(held.data, bucket) for held, bucket in zip(before, after, strict=True)]
    digests = Digests([held_by(models, PARTS)])
    for bucket in after:
        digests.add(bucket)
    for model in models:
        apply(model, entries, deltas)
    return digests.differences(held_by(models, DIGESTS))


def locations(moved):
    """Expert locations of two ranks in SGLang's form."""
    places = torch.tensor(moved)
    of_expert = [
        [[place for place, own in enumerate(layer) if own == expert] for expert in range(4)] for layer in moved
    ]
    padded = torch.tensor([[(own + [-1] * 6)[:6] for own in layer] for layer in of_expert])
    return ExpertLocationMetadata(
        physical_to_logical_map=places, physical_to_logical_map_cpu=places, logical_to_all_physical_map=padded,
        logical_to_all_physical_map_cpu=padded, logical_to_all_physical_map_num_valid=(padded != -1).sum(-1), ep_size=2,
        logical_to_rank_dispatch_physical_map=None,
    )  # fmt: skip


def refusal(models):
    """The refusal for a model in which one parameter has another loader than its layer's."""
    model = models[0]
    model.model.norm.weight.weight_loader = flatten
    return places_of_weights(model, PARTS, ranks=len(models)).get(REFUSED)


def weights_of(model):
    yield from model.named_parameters()
    for name, module in model.named_modules():
        for own in ("w_kc", "w_vc"):
            if getattr(module, own, None) is not None:
                yield f"{name}.{own}", getattr(module, own)


def changes(tensor):
    """Changes an element that is not padding, one after the other: nothing else is zero."""
    places = [tuple(place) for place in tensor.nonzero().tolist()]
    for place in {*places[:1], *places[-1:], *places[len(places) // 2 :][:1]}:
        before = tensor[place].item()
        tensor[place] = before + 1
        yield place
        tensor[place] = before


def play(layout, folder):
    tensors = files_of(layout, folder)
    models = []
    for rank in range(layout.ranks):
        with get_parallel().override(**layout.of(rank)):
            models.append(loaded(layout, folder, tensors))
    digests = Digests([held_by(models, PARTS)])
    digests.add(flatten([(name, tensor.float()) for name, tensor in tensors.items()], index=0, last=True))
    message = held_by(models, DIGESTS)
    first = digests.differences(message)
    found = {}
    for rank, model in enumerate(models):
        for name, tensor in weights_of(model):
            for place in changes(tensor):
                now = ServerShards(ranks={**message.ranks, rank: held_by([model], DIGESTS).ranks[0]})
                found[f"{rank} {name} {place}"] = digests.differences(now)
    whole = checksum_of_weights(models[0])[0] if layout.ranks == 1 else None
    delta = after_delta(models, tensors)
    return {"differences": first, "changed": found, "whole": whole, "delta": delta, "refused": refusal(models)}


def meet(folder):
    """This process alone."""
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.bfloat16)
    init_distributed_environment(
        world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=f"file://{folder / 'meeting'}"
    )


def main():
    folder = Path(sys.argv[1])
    meet(folder)
    for name, layout in LAYOUTS.items():
        places = locations(layout.moved) if layout.moved else None
        set_global_expert_location_metadata(places, allow_overwrite=True)
        options = {
            "ep_num_redundant_experts": 2 if layout.moved else 0,
            "device": "cpu",
            "model_path": "none",
            "disable_shared_experts_fusion": not layout.fused,
        }
        with get_context().override_server_args(**options):
            if not model_parallel_is_initialized():
                initialize_model_parallel(backend="gloo")
            print(json.dumps({"layout": name, **play(layout, folder / name)}), flush=True)


if __name__ == "__main__":
    main()
