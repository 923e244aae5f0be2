"""Folders and options that are refused, and the error messages."""

import json
import shutil
import subprocess
import sys

import pytest

from slime_core.errors import ModelError
from slime_fsdp.causal_models import TABLE, causal_model_types, types_in
from slime_fsdp.config import FsdpConfig
from slime_fsdp.plugin import Fsdp

QWEN = {"model_type": "qwen3"}


def copy_of(folder, target, **changes):
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_folders_that_cannot_be_used(folders, start, tmp_path):
    source = folders("qwen3")

    def refused(folder, text):
        with pytest.raises(ModelError, match=text) as caught:
            start(folder)
        assert str(folder) in str(caught.value)

    refused(tmp_path / "nowhere", "no such folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no config.json")
    refused(copy_of(source, tmp_path / "bert", model_type="vit"), "no causal language model")
    refused(copy_of(source, tmp_path / "unknown", model_type="quen3"), "quen3")
    bare = copy_of(source, tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    refused(bare, "no weights")
    cut = copy_of(source, tmp_path / "cut")
    whole = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(cut, "damaged or cut short")
    for model_type, text in {
        "glm_moe_dsa": "deepseek_sparse_attention",
        "mamba": "layer_types mamba",
        "recurrent_gemma": "layer_types attention, recurrent",
        "rwkv": "pass a state",
    }.items():
        other = copy_of(source, tmp_path / model_type)
        (other / "config.json").write_text(json.dumps({"model_type": model_type}))
        refused(other, text)
    refused(copy_of(source, tmp_path / "deeper", num_hidden_layers=3, layer_types=None), "weights are missing")
    other = copy_of(source, tmp_path / "llama", model_type="llama", architectures=["LlamaForCausalLM"])
    refused(
        other, r"4 tensors of its files do not belong to a llama model, such as model.layers.0.self_attn.k_norm.weight"
    )
    shallower = copy_of(source, tmp_path / "shallower", num_hidden_layers=1, layer_types=None)
    refused(shallower, r"do not belong to a qwen3 model, such as model.layers.1.input_layernorm.weight")
    index = copy_of(source, tmp_path / "index")
    (index / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-2.safetensors"}}))
    refused(index, "model-2.safetensors")


def test_a_copy_that_cannot_be_used_is_refused_before_anything_is_loaded(folders, start, tmp_path):
    with pytest.raises(ModelError, match="no such folder"):
        start(folders("qwen3"), frozen_models={"reference": tmp_path / "nowhere"})


def test_problems():
    assert Fsdp.problems(FsdpConfig(), 3, QWEN) == []
    (problem,) = Fsdp.problems(FsdpConfig(context_parallel_size=2), 3, QWEN)
    assert "context_parallel_size = 2" in problem
    (problem,) = Fsdp.problems(FsdpConfig(), 1, {"model_type": "qwem3"})
    assert "close: " in problem
    assert "qwen3" in problem
    (problem,) = Fsdp.problems(FsdpConfig(), 1, QWEN | {"layer_types": ["linear_attention", "full_attention"]})
    assert "linear_attention" in problem
    whole = {"model_type": "qwen3_5", "text_config": {"layer_types": ["linear_attention"]}, "vision_config": {}}
    (problem,) = Fsdp.problems(FsdpConfig(), 1, whole)
    assert "linear_attention" in problem
    # The released config has no kinds of layers.
    linear = {"model_type": "qwen3_next", "full_attention_interval": 4}
    assert Fsdp.problems(FsdpConfig(), 1, linear) == []
    (problem,) = Fsdp.problems(FsdpConfig(attn_implementation="sdpa"), 1, linear)
    assert "one sequence into the next" in problem
    (problem,) = Fsdp.problems(FsdpConfig(context_parallel_size=2), 2, linear)
    assert "not sharded over ranks" in problem
    (problem,) = Fsdp.problems(FsdpConfig(), 1, {"model_type": "gemma2", "final_logit_softcapping": 30.0})
    assert "final_logit_softcapping" in problem
    assert len(Fsdp.problems(FsdpConfig(context_parallel_size=2, attn_implementation="sdpa"), 3, {})) == 3


def test_layout():
    config = FsdpConfig(context_parallel_size=2)
    assert Fsdp.min_world_size(config) == 2
    found = [Fsdp.layout(config, rank, 4) for rank in range(4)]
    assert [(at.dp_rank, at.cp_rank) for at in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all((at.dp_size, at.cp_size, at.reports) == (2, 2, True) for at in found)


def test_every_option_is_documented():
    assert all(field.description for field in FsdpConfig.model_fields.values())


def test_options_are_checked_without_heavy_imports():
    code = (
        "import sys\n"
        "from slime_fsdp.config import FsdpConfig\n"
        "from slime_fsdp.plugin import Fsdp\n"
        "found = Fsdp.problems(FsdpConfig(), 2, {'model_type': 'qwem3'})\n"
        "print(len(found), [m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])\n"
    )
    given = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert given.stdout.strip() == "1 []"


def test_the_table_from_the_source_equals_transformers():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert causal_model_types() == frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (f"{TABLE} = OrderedDict([('a', 'AForCausalLM'), ('b', ('B', 'C'))])", {"a", "b"}),
        # A table in another form has to be imported.
        (f"{TABLE} = OrderedDict([('a', 'AForCausalLM'), *OTHERS])", set()),
        (f"{TABLE} = OrderedDict(OTHERS)", set()),
        ("OTHERS = OrderedDict([('a', 'AForCausalLM')])", set()),
    ],
)
def test_a_table_is_read_only_in_literal_form(source, expected):
    assert types_in(source) == expected
