"""Errors of `slime run` for what Megatron cannot do: one paragraph with the key and the fix, before anything is started."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_models.new_model import ModelSizes, new_model
from slime_plugin_kit.tiny_model import ALPHABET, MAX_LENGTH

pytestmark = pytest.mark.megatron


@pytest.fixture(scope="module")
def project(make_project, tmp_path_factory):
    return make_project(tmp_path_factory.mktemp("bad"))


def model_with(project, name, *, config=None, weights=None):
    """A copy of the model, changed."""
    folder = project.folder / name
    shutil.copytree(project.folder / "base", folder)
    if config is not None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
    if weights is not None:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        weights(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
    return name


def test_a_layout_that_divides_nothing(project):
    experts = {"num_experts": 6, "moe_intermediate_size": 24, "model_type": "qwen3_moe", "num_hidden_layers": 10}
    model = model_with(project, "experts", config={**experts, "layer_types": None})
    message = project.refused(
        *("--hf-checkpoint", model, "--launcher", "ray", "--actor-num-gpus-per-node", "7"),
        *("--tensor-model-parallel-size", "3", "--pipeline-model-parallel-size", "4"),
        *("--expert-model-parallel-size", "4", "--context-parallel-size", "2"),
    )
    for given in (
        "tensor_model_parallel_size = 3: does not divide the model's 4 attention heads; the nearest that do: 2 or 4",
        "4 pieces do not divide the model's 10 layers; the nearest that do: 2 or 5 pieces",
        "expert_model_parallel_size = 4: does not divide the model's 6 experts; the nearest that do: 3 or 6",
        "with experts Megatron requires sequence_parallel = true",
        "3 x 4 x 2 = 24: does not divide the 7 ranks; the nearest numbers of ranks: 24",
    ):
        assert given in message
    message = project.refused("--hf-checkpoint", model, "--tensor-model-parallel-size", "3")
    assert "Pass --launcher ray" in message
    assert "does not divide the model's 4 attention heads" in message
    assert not (project.folder / "runs").exists()


def test_a_family_without_a_bridge(project):
    model = model_with(project, "gemma", config={"model_type": "gemma3_text"})
    message = project.refused("--hf-checkpoint", model)
    assert "in the model's config.json: backend megatron has no bridge for this family" in message
    assert 'model_type = "gemma3_text"' in message
    assert "qwen3_moe" in message
    assert "slime_megatron.bridges" in message


def test_missing_and_extra_weights(project):
    def change(tensors):
        del tensors["model.layers.1.self_attn.q_norm.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(3, 3)

    message = project.refused("--hf-checkpoint", model_with(project, "torn", weights=change))
    assert "1 weights are missing from its files: model.layers.1.self_attn.q_norm.weight" in message
    assert "the model has no place for 1 of its weights: model.layers.7.mlp.up_proj.weight" in message


def test_megatron_is_not_installed(project, tmp_path):
    # The namespace of another package comes first, as after megatron-core was removed and another part of it stayed.
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron/__init__.py").touch()
    message = project.refused("--dry-run", site=tmp_path)
    assert 'Megatron-core is not installed here: pip install "slime-megatron[core]".' in message


def test_a_checkpoint_of_another_architecture(project):
    project.run("--name", "whole", "--num-rollout", "1", "--save-interval", "1")
    (project.folder / "runs/whole/summary.json").unlink()
    # Another model in the folder of the first one.
    shutil.rmtree(project.folder / "base")
    sizes = ModelSizes(
        hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=4, intermediate_size=64, max_length=MAX_LENGTH
    )
    new_model(project.folder / "base", "qwen3", sizes, alphabet=ALPHABET)
    message = project.refused("--name", "whole", "--num-rollout", "2", "--save-interval", "1")
    assert "another architecture or optimizer" in message
    assert "ffn_hidden_size is 48 there and 64 here" in message
    assert "num_query_groups is 2 there and 4 here" in message
