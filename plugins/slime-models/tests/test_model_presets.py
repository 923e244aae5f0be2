"""Presets have as many parameters as the public models, and random models of their shape load."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from slime_core.cli.main import app
from slime_core.errors import ConfigError
from slime_models.model_presets import PRESETS, Preset
from slime_models.new_model import new_preset

# One for each family and form; the others differ in numbers that were checked once in the same way.
BUILT = [
    "qwen2.5-0.5B",
    "qwen3-4B",
    "qwen3-30B-A3B",
    "qwen3-next-80B-A3B",
    "llama3.1-8B",
    "glm4-9B",
    "glm4.5-106B-A12B",
    "glm4.7-30B-A3B",
    "glm5-744B-A40B",
    "deepseek-v3.2",
    "moonlight-16B-A3B",
]


@pytest.mark.parametrize("name", BUILT)
def test_it_has_as_many_parameters_as_the_public_model(name):
    preset = PRESETS[name]
    config = AutoConfig.for_model(preset.architecture, **preset.fields)
    for key, value in preset.fields.items():
        if key not in ("rope_theta", "partial_rotary_factor"):
            assert getattr(config, key) == value
    assert config.rope_parameters["rope_theta"] == preset.fields["rope_theta"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    assert counted == pytest.approx(preset.billions, rel=0.005)


def test_list_and_show():
    listed = CliRunner().invoke(app, ["models", "list"]).stdout
    assert [line.split()[0] for line in listed.splitlines()[1:]] == list(PRESETS)
    shown = json.loads(CliRunner().invoke(app, ["models", "show", "qwen3-8B"]).stdout)
    assert shown["model_type"] == "qwen3"
    assert shown["num_hidden_layers"] == 36
    error = CliRunner().invoke(app, ["models", "show", "qwen3-8b"]).exception
    assert isinstance(error, ConfigError)
    assert "close match: qwen3-8B" in str(error)


def test_new(tmp_path):
    fields = {**PRESETS["qwen3-4B"].fields, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 8}
    small = Preset(architecture="qwen3", billions=0, fields={**fields, "vocab_size": 32, "num_attention_heads": 8})
    count = new_preset(tmp_path / "made", small, alphabet="0123")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert model.num_parameters() == count
    assert model.dtype == torch.bfloat16
    given = ["models", "new", str(tmp_path / "x"), "--alphabet", "01", "--preset", "qwen3-4B", "--num-layers", "2"]
    assert "leave those out" in str(CliRunner().invoke(app, given).exception)
