"""Quantized folders beside a float64 oracle of the documented layouts, and beside transformers, which reads some of them."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slime_core.config.part import PluginSpec
from slime_core.errors import ModelError
from slime_core.registry import Registry
from slime_models.convert import convert
from slime_plugin_kit.converted_folder import converted_folder
from slime_plugin_kit.tiny_model import make_tiny_model
from slime_training.weight_files import file_of

MATRIX = "model.layers.0.mlp.down_proj.weight"
E4M3_MAX = 448.0


def converter(name, **options):
    return PluginSpec(group="slime.converters", name=name, options=options).resolve(Registry())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def quantized(model, folder, name, **options):
    """In this process; the kernel's own part is tried in test_by_the_command."""
    return converted_folder(model, folder / "target", name, **options)


def tensors(folder):
    return {name: load_file(file)[name] for name, file in file_of(folder).items()}


def config_of(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def e4m3(numbers):
    """Rounded to the nearest float8, ties to even, by its definition: 4 exponent bits with bias 7, 3 of mantissa."""
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(numbers), 2.0**-20))), -6)
    step = 2.0 ** (exponent - 3)
    return np.clip(np.round(numbers / step) * step, -E4M3_MAX, E4M3_MAX)


def assert_float8(weight, scale, expected_scale, original):
    """`scale`s broadcast over the matrix."""
    assert weight.dtype == torch.float8_e4m3fn
    assert np.allclose(scale, expected_scale, rtol=1e-6)
    got = weight.float().double().numpy()
    # Beside the middle of two numbers, one float32 division may fall to the other side.
    expected = e4m3(original / scale)
    same = got == expected
    assert same.mean() > 0.99
    assert np.abs(got * scale - original).max() <= np.abs(original).max() / 16 * 1.01


def test_fp8_in_blocks(model, tmp_path):
    made = quantized(model, tmp_path, "fp8", block_size=20)
    found, original = tensors(made), tensors(model)[MATRIX].double().numpy()
    scale = found[MATRIX.replace("weight", "weight_scale_inv")]
    assert scale.dtype == torch.float32
    # 32 x 48 in blocks of 20: the last ones are cut off.
    assert tuple(scale.shape) == (2, 3)
    blocks = np.zeros((2, 3))
    for row in range(2):
        for column in range(3):
            part = original[20 * row : 20 * row + 20, 20 * column : 20 * column + 20]
            blocks[row, column] = np.abs(part).max() / E4M3_MAX
    spread = np.kron(scale.double().numpy(), np.ones((20, 20)))[:32, :48]
    assert_float8(found[MATRIX], spread, np.kron(blocks, np.ones((20, 20)))[:32, :48], original)
    config = config_of(made)
    assert config["quant_method"] == "fp8"
    assert config["weight_block_size"] == [20, 20]
    assert config["activation_scheme"] == "dynamic"
    assert config["modules_to_not_convert"] == ["lm_head"]


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_fp8_with_a_scale_for_each_channel_or_one(model, tmp_path, strategy):
    made = quantized(model, tmp_path, "fp8", strategy=strategy)
    found, original = tensors(made), tensors(model)[MATRIX].double().numpy()
    scale = found[MATRIX.replace("weight", "weight_scale")].double().numpy()
    largest = np.abs(original).max(1, keepdims=True) if strategy == "channel" else np.abs(original).max(keepdims=True)
    assert scale.shape == ((32, 1) if strategy == "channel" else (1,))
    assert_float8(found[MATRIX], np.broadcast_to(scale, original.shape), largest / E4M3_MAX, original)
    group = config_of(made)["config_groups"]["group_0"]
    assert group["weights"]["strategy"] == strategy
    assert group["input_activations"]["dynamic"] is True


def test_int4(model, tmp_path):
    made = quantized(model, tmp_path, "int4", group_size=16)
    found, original = tensors(made), tensors(model)[MATRIX].double().numpy()
    stem = MATRIX.removesuffix("weight")
    packed = found[stem + "weight_packed"].numpy().astype(np.uint32)
    scale = found[stem + "weight_scale"].double().numpy()
    assert found[stem + "weight_shape"].tolist() == [32, 48]
    assert packed.shape == (32, 6)
    # Eight numbers in each word, the first in the lowest bits, shifted by eight.
    numbers = np.stack([(packed >> (4 * place)) & 15 for place in range(8)], -1).reshape(32, 48).astype(np.int64) - 8
    groups = original.reshape(32, 3, 16)
    assert np.allclose(scale, np.abs(groups).max(2) / 7.5, rtol=1e-6)
    expected = np.clip(np.round(groups / scale[:, :, None]), -8, 7).reshape(32, 48)
    # The largest of a group is at 7.5 steps, in the middle between two numbers.
    assert (numbers == expected).mean() > 0.98
    spread = np.repeat(scale, 16, axis=1)
    assert (np.abs(numbers * spread - original) <= spread * 0.50001).all()
    assert config_of(made)["format"] == "pack-quantized"


@pytest.mark.parametrize(
    ("name", "options", "bound"), [("fp8", {"strategy": "channel"}, 0.3), ("int4", {"group_size": 16}, 1.5)]
)
def test_transformers_reads_it(model, tmp_path, name, options, bound):
    """Its own loader, with weights made whole again."""
    made = quantized(model, tmp_path, name, **options)
    tokens = torch.tensor([[5, 9, 3, 7, 11, 4]])
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(tokens).logits.log_softmax(-1)
        got = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)(tokens).logits.float().log_softmax(-1)
    apart = float((got - expected).abs().mean())
    assert 0 < apart < bound


def test_what_stays_as_it_is(model, tmp_path):
    made = quantized(model, tmp_path, "int4", group_size=16, ignore=["lm_head", "embed", r"o_proj$"])
    found, before = tensors(made), tensors(model)
    kept = [name for name in before if name in found]
    assert all(torch.equal(found[name], before[name]) for name in kept)
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.layers.1.self_attn.o_proj.weight"} <= set(kept)
    assert not any(name.endswith("mlp.up_proj.weight") for name in kept)
    assert "model.layers.1.self_attn.o_proj" in config_of(made)["ignore"]


def test_by_the_command(model, tmp_path):
    """The kernel's part: worker processes, the journal, reading back."""
    news = []
    # Killed before a piece was done, and begun with other options.
    (tmp_path / "fp8.converting").mkdir()
    (tmp_path / "fp8.converting" / "journal.jsonl").write_text('{"options": {"block_size": 20}}\n')
    done = convert(
        converter("fp8", block_size=16),
        model,
        tmp_path / "fp8",
        workers=1,
        report=lambda *progress: news.append(progress),
    )
    assert (done.num_pieces, done.num_resumed) == (1, 0)
    assert [what for what, *_ in news] == ["converting"] * 2 + ["comparing"] * 2
    assert not (tmp_path / "fp8.converting").exists()
    with pytest.raises(ModelError, match="exists already"):
        convert(converter("fp8"), model, tmp_path / "fp8", workers=1, report=print)
    with pytest.raises(ModelError, match="quantized already"):
        convert(converter("fp8"), tmp_path / "fp8", tmp_path / "again", workers=1, report=print)


def test_what_is_trained_becomes_what_its_folder_would_hold(model, tmp_path):
    """Bit for bit what a conversion of the trained folder makes, of the names that the engines' folder has."""
    engines, trained = tmp_path / "engines", tmp_path / "trained"
    engines.mkdir()
    (trained / "converted").mkdir(parents=True)
    held = quantized(model, engines, "fp8", block_size=20, ignore=["lm_head", "embed", r"o_proj$"])
    weights = {name: tensor.flip(-1).contiguous() for name, tensor in tensors(model).items()}
    for file in model.iterdir():
        (trained / file.name).write_bytes(file.read_bytes())
    save_file(weights, trained / "model.safetensors", metadata={"format": "pt"})
    expected = tensors(
        quantized(trained, trained / "converted", "fp8", block_size=20, ignore=["lm_head", "embed", r"o_proj$"])
    )

    format_ = converter("fp8").driver.tensor_format(held)
    found = {}
    for layer in (list(weights)[:5], list(weights)[5:]):
        made = format_.converted({name: weights[name] for name in layer})
        assert list(made) == [part for name in layer for part in format_.names(name)]
        found |= made
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in expected)
    assert (
        found["model.layers.0.self_attn.o_proj.weight"].dtype == weights["model.layers.0.self_attn.o_proj.weight"].dtype
    )
    assert format_.names(MATRIX) == (MATRIX, MATRIX.replace("weight", "weight_scale_inv"))


def test_blocks_are_those_of_compressed_tensors():
    """With blocks that are cut off, one of zeros, and one whose largest number rounds past the format's."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    from slime_quantize.blocks import BlockScheme

    torch.manual_seed(0)
    weights = {str(number): torch.randn(40, 56) * 10.0**number for number in range(-3, 4)}
    weights |= {f"half {number}": tensor.bfloat16() for number, tensor in weights.items()} | {
        "wide": torch.randn(16, 96)
    }
    weights["0"][:16, :16] = 0
    args = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[16, 16], symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    found = BlockScheme(16).of_all(weights)
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        rows, columns = weight.shape
        padded = torch.nn.functional.pad(weight.float(), (0, -columns % 16, 0, -rows % 16))
        blocks = padded.unflatten(0, (-1, 16)).unflatten(2, (-1, 16))
        scale, _ = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)
        compressor = BaseCompressor.get_value_from_registry("float-quantized")
        made = compressor.compress({"weight": weight.float(), "weight_scale": scale}, scheme)
        assert torch.equal(found[name][1], made["weight_scale"])
        assert torch.equal(found[name][0].view(torch.uint8), made["weight"].view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "options", "writes"),
    [("fp8", {"block_size": 20}, True), ("fp8", {"strategy": "channel"}, False), ("int4", {"group_size": 16}, False)],
)
def test_which_folders_can_be_trained_for(model, tmp_path, name, options, writes):
    made = config_of(quantized(model, tmp_path, name, **options))
    assert [converter(known).driver.writes(made) for known in ("fp8", "int4")] == [writes, False]


def test_a_folder_that_declares_quantized_weights_without_scales(model, tmp_path):
    config = json.loads((model / "config.json").read_text())
    known = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": known}))
    (tmp_path / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    with pytest.raises(
        ModelError, match=r"declares quantized weights, but the folder has no scales \(weight_scale_inv\)"
    ):
        converter("fp8").driver.tensor_format(tmp_path)


def test_blocks_that_are_not_square(model, tmp_path):
    made = quantized(model, tmp_path, "fp8", block_size=20)
    config = json.loads((made / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [20, 10]
    (made / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="blocks are 20 by 10, and only square ones"):
        converter("fp8").driver.tensor_format(made)


def test_what_cannot_be_quantized(model, tmp_path):
    with pytest.raises(ModelError, match=r"48 inputs are no multiple of group_size = 128.*--group-size"):
        converter("int4").build().pieces(model)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    weights[MATRIX][3, 4] = torch.nan
    save_file(weights, broken / "model.safetensors")
    with pytest.raises(ModelError, match=r"down_proj.weight: it holds numbers that are not finite"):
        convert(converter("fp8"), broken, tmp_path / "other", workers=1, report=print)
    assert [path.name for path in tmp_path.iterdir()] == ["broken"], "what is left of it is in the way of the next try"
    (broken / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"damaged or cut short"):
        converter("fp8").build().pieces(broken)
