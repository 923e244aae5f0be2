"""Drivers: found by name, light to import, strict about options."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from pydantic import ValidationError

from slime_core.errors import ModelError
from slime_local.plugin import Direct, Local


def test_entry_points():
    (engine,) = entry_points(group="slime.engines", name="local")
    (transport,) = entry_points(group="slime.transports", name="direct")
    assert engine.load() is Local
    assert transport.load() is Direct
    assert Local.transports == ("direct",)
    assert Direct.serves == ("local", "sglang")


def test_importing_the_drivers_is_light():
    code = (
        "import sys, slime_local.plugin\n"
        "heavy = {'torch', 'transformers', 'ray', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("config", [Local.Config, Direct.Config])
def test_configs(config):
    assert config.model_validate_json(config().model_dump_json()) == config()
    with pytest.raises(ValidationError):
        config(unheard_of=1)
    assert all(field.description for field in config.model_fields.values())


async def test_models_that_it_cannot_decode(tmp_path, engines):
    from transformers import Gemma2Config, Gemma2ForCausalLM, MambaConfig, MambaForCausalLM

    small = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 1, "eos_token_id": 2}
    MambaForCausalLM(MambaConfig(**small, state_size=4)).save_pretrained(tmp_path / "mamba")
    with pytest.raises(ModelError, match="Use another engine"):
        await engines(tmp_path / "mamba")
    gemma = Gemma2Config(
        **small, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8, pad_token_id=0
    )
    Gemma2ForCausalLM(gemma).save_pretrained(tmp_path / "gemma")
    with pytest.raises(ModelError, match="softcap"):
        await engines(tmp_path / "gemma")


async def test_weights_of_another_shape(tmp_path, engines):
    import torch
    from safetensors.torch import load_file, save_file

    from slime_plugin_kit.tiny_model import make_tiny_model

    file = make_tiny_model(tmp_path / "tiny") / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 3)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="tiny: engine 0 cannot load the weights"):
        await engines(tmp_path / "tiny")
