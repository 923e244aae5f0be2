"""Models of SGLang in float8 by block, as each rank builds and loads them, without the kernels of a GPU:
`quantised_models.py FOLDER`. For each layout prints a line of JSON: parameters that are other after a push to a model that was
loaded before, than in one that was loaded from the converted folder; and how many are in float8. A process of its own, as
spread_models.py."""

import json
import sys
from pathlib import Path

import spread_models
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.distributed import initialize_model_parallel
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.models.deepseek_v2 import DeepseekV3ForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM
from sglang.srt.runtime_context import get_context, get_parallel
from spread_models import LATENT, MIXTURE, SMALL, Layout, files_of
from transformers import AutoConfig

from slime_core import groups
from slime_core.config.part import PluginSpec
from slime_core.registry import Registry
from slime_plugin_kit.converted_folder import converted_folder
from slime_transports.flattened_bucket import flat_buckets

BLOCK = 8
WIDE = SMALL | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
LAYOUTS = {
    "dense": Layout(Qwen3ForCausalLM, "qwen3", WIDE),
    "experts-spread": Layout(Qwen3MoeForCausalLM, "qwen3_moe", WIDE | MIXTURE, experts=2),
    "latent": Layout(DeepseekV3ForCausalLM, "deepseek_v3", WIDE | LATENT | {"q_lora_rank": 32}),
}


def converted(source, target):
    (file,) = converted_folder(source, target, "fp8", block_size=BLOCK).glob("*.safetensors")
    return load_file(file)


def loaded(layout, folder, tensors):
    quantization = Fp8Config(
        is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[BLOCK, BLOCK]
    )
    model = layout.model(AutoConfig.from_pretrained(folder), quant_config=quantization)
    take(model, tensors.items())
    return model


def take(model, tensors):
    for bucket in flat_buckets(({name: tensor} for name, tensor in tensors), spread_models.BUCKET):
        model.load_weights(list(bucket.tensors()))


def play(layout, folder):
    first = files_of(layout, folder / "first")
    from_first = converted(folder / "first", folder / "first-fp8")
    (folder / "trained").mkdir()
    for file in (folder / "first").iterdir():
        (folder / "trained" / file.name).write_bytes(file.read_bytes())
    trained = {name: tensor.flip(-1).contiguous() for name, tensor in first.items()}
    save_file(trained, folder / "trained" / "model.safetensors", metadata={"format": "pt"})
    from_trained = converted(folder / "trained", folder / "trained-fp8")
    named = PluginSpec(group=groups.CONVERTERS, name="fp8", options={}).resolve(Registry())
    sent = named.driver.tensor_format(folder / "first-fp8").converted(trained)
    wrong, narrow = [], 0
    for rank in range(layout.ranks):
        with get_parallel().override(**layout.of(rank)):
            pushed = loaded(layout, folder / "first", from_first)
            take(pushed, sent.items())
            expected = dict(loaded(layout, folder / "first", from_trained).named_parameters())
            for name, tensor in pushed.named_parameters():
                narrow += tensor.dtype == torch.float8_e4m3fn
                if not torch.equal(bits(tensor), bits(expected[name])):
                    wrong.append(f"{rank} {name}")
    return {"wrong": wrong, "float8": int(narrow)}


def bits(tensor):
    return tensor.data.contiguous().view(-1).view(torch.uint8)


def main():
    folder = Path(sys.argv[1])
    spread_models.meet(folder)
    with get_context().override_server_args(device="cpu", model_path="none", disable_shared_experts_fusion=True):
        initialize_model_parallel(backend="gloo")
        for name, layout in LAYOUTS.items():
            (folder / name).mkdir()
            print(json.dumps({"layout": name, **play(layout, folder / name)}), flush=True)


if __name__ == "__main__":
    main()
