"""torch_dist as Megatron's own training saves it: its folders, objects beside tensors, and its names of norms."""

import argparse
import json
import os
import pickle
import re
import shutil

import pytest
import torch
import torch.distributed as dist
from families import COMMON, make_family
from safetensors.torch import load_file

from slime_core.errors import CheckpointError

pytestmark = pytest.mark.megatron

TOKENS = torch.tensor([[3, 17, 4, 4, 24, 9, 11]])
PADDED_VOCABULARY = 32
"""A multiple that ranks can divide, as of `--make-vocab-size-divisible-by`."""


class Leftover:
    """An object of a program that is not installed where its checkpoint is read."""


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    return make_family(tmp_path_factory.mktemp("model") / "qwen3", "qwen3", seed=5)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A folder, and the logits (1, N, V) of Megatron's own model that was saved there."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from slime_megatron.checkpoint import PlainSave
    from slime_megatron.cpu import use_cpu
    from slime_training.process_group import make_single_group

    use_cpu()
    if dist.is_initialized():
        # That of a file before.
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    make_single_group()
    parallel_state.initialize_model_parallel()
    torch.manual_seed(3)
    config = TransformerConfig(
        num_layers=COMMON["num_hidden_layers"],
        hidden_size=COMMON["hidden_size"],
        ffn_hidden_size=COMMON["intermediate_size"],
        num_attention_heads=COMMON["num_attention_heads"],
        num_query_groups=COMMON["num_key_value_heads"],
        kv_channels=16,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
    )
    # Megatron's local layers give norms the names that Transformer Engine's fused layers have.
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=PADDED_VOCABULARY,
        max_sequence_length=64,
        position_embedding_type="rope",
        rotary_base=10000,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3 + float(parameter.ndim == 1))
        model.eval()
        positions = torch.arange(TOKENS.shape[1])[None]
        later = torch.ones(1, 1, TOKENS.shape[1], TOKENS.shape[1]).triu(1).bool()
        logits = model(TOKENS, positions, later)
    folder = tmp_path_factory.mktemp("theirs")
    place = folder / "iter_0000007"
    place.mkdir()
    beside = {"args": argparse.Namespace(lr=1e-6, left=Leftover()), "checkpoint_version": 3.0, "iteration": 7}
    state = {**beside, "model": model.sharded_state_dict()}
    dist_checkpointing.save(state, str(place), sharded_strategy=PlainSave())
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    yield folder, logits[..., : COMMON["vocab_size"]]
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def test_their_names_are_those_of_fused_layers(theirs):
    from slime_megatron.torch_dist_folder import read_metadata, shapes_in

    shapes = shapes_in(read_metadata(theirs[0] / "iter_0000007"))
    assert shapes["decoder.layers.self_attention.linear_qkv.layer_norm_weight"] == (4, 32)
    assert shapes["decoder.layers.mlp.linear_fc1.layer_norm_weight"] == (4, 32)
    assert "decoder.layers.input_layernorm.weight" not in shapes


def weights_of(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def converted(source, target, hf):
    from test_conversion import run

    run("hf", source, target, hf_checkpoint=str(hf))
    return target


@pytest.fixture(scope="module", autouse=True)
def without_workers():
    from test_conversion import HereExecutor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slime_models.convert.ProcessPoolExecutor", HereExecutor)
        yield


def test_it_is_converted_to_the_model_that_was_saved(theirs, hf, tmp_path):
    from transformers import AutoModelForCausalLM

    folder, expected = theirs
    model = AutoModelForCausalLM.from_pretrained(converted(folder, tmp_path / "hf", hf), dtype=torch.float32)
    with torch.no_grad():
        found = model(TOKENS).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_a_release_and_the_folder_of_one_iteration_are_found(theirs, hf, tmp_path):
    folder, _ = theirs
    shutil.copytree(folder / "iter_0000007", tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    one, other = (
        weights_of(converted(source, tmp_path / name, hf))
        for name, source in (("one", tmp_path), ("other", folder / "iter_0000007"))
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], tensor) for name, tensor in other.items())
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    with pytest.raises(CheckpointError, match=r"it names iter_0000012, and .*\.metadata does not exist"):
        converted(tmp_path, tmp_path / "none", hf)


def test_a_list_of_tensors_that_would_run_code_is_refused(theirs, hf, tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    copied = shutil.copytree(theirs[0] / "iter_0000007", tmp_path / "copied")
    with (copied / ".metadata").open("wb") as file:
        pickle.dump(Trap(), file)
    with pytest.raises(CheckpointError, match=re.escape(".metadata: cannot be read: posix.mkdir is no part of a list")):
        converted(copied, tmp_path / "none", hf)
    assert not (tmp_path / "ran").exists()


def test_a_model_of_another_shape_is_named(theirs, tmp_path):
    other = make_family(tmp_path / "other", "qwen3")
    config = json.loads((other / "config.json").read_text())
    config.pop("layer_types", None)
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    expected = r"mlp.linear_fc1.layer_norm_weight is \(4, 32\) there and \(2, 32\) in the model"
    with pytest.raises(CheckpointError, match=expected):
        converted(theirs[0], tmp_path / "none", other)


LAYOUTS = {
    "one": (1, {}),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2-vpp2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def frozen(theirs, hf, tmp_path_factory):
    """Each layout with the checkpoint as its reference, and with the Hugging Face folder that it is converted to."""
    from conftest import run_layouts

    made = converted(theirs[0], tmp_path_factory.mktemp("converted") / "hf", hf)
    cases = {
        f"{name}, {kind}": {"model": str(hf), "world_size": count, "options": options, "frozen": str(folder)}
        for name, (count, options) in LAYOUTS.items()
        for kind, folder in (("torch_dist", theirs[0]), ("hf", made))
    }
    # A reference with larger heads.
    short = {"model": str(make_family(tmp_path_factory.mktemp("other") / "llama3", "llama3")), "frozen": str(theirs[0])}
    cases["other"] = {"world_size": 1, "options": {}, **short}
    return run_layouts(tmp_path_factory.mktemp("layouts"), cases)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reads_it_as_the_reference(frozen, layout):
    read, expected = frozen.ranks(f"{layout}, torch_dist"), frozen.ranks(f"{layout}, hf")
    held = 0
    for one, other in zip(read, expected, strict=True):
        for name, column in other["frozen_scores"].items():
            here = ~column.isnan()
            held += int(here.sum())
            assert torch.equal(one["frozen_scores"][name][here], column[here])
            assert not here.any() or not torch.equal(one["scores"][name][here], column[here])
        # The trained weights are those of the model.
        for name, tensor in other["before"].items():
            assert torch.equal(one["before"][name], tensor)
    assert held > 0


def test_a_reference_of_another_architecture_is_an_error(frozen):
    failure = (frozen.out / "other" / "failure.txt").read_text()
    assert re.search(
        r"CheckpointError: .*iter_0000007: it is not of the trained model: .*linear_qkv.weight is", failure
    )
