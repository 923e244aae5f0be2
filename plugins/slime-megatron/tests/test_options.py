"""Options of the installed Megatron under its own names."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from slime_core.errors import ConfigError
from slime_core.registry import Registry
from slime_core.registry.options import bind
from slime_megatron import options, plugin
from slime_megatron.plugin import Megatron, megatron_options

pytestmark = pytest.mark.megatron

MODEL = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}


def test_options_of_each_record():
    config = Megatron.Config(
        recompute_granularity="full",
        recompute_num_layers=2,
        overlap_grad_reduce=True,
        loss_scale=1024.0,
        moe_z_loss_coeff=0.001,
    )
    assert megatron_options(config, options.MODEL) == {
        "recompute_granularity": "full",
        "recompute_num_layers": 2,
        "moe_z_loss_coeff": 0.001,
    }
    assert megatron_options(config, options.OPTIMIZER) == {"loss_scale": 1024.0}
    assert megatron_options(config, options.DATA_PARALLEL) == {"overlap_grad_reduce": True}


def test_fields_are_those_of_the_installed_records():
    from dataclasses import fields

    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    records = {
        options.MODEL: MLATransformerConfig,
        options.OPTIMIZER: OptimizerConfig,
        options.DATA_PARALLEL: DistributedDataParallelConfig,
    }
    for of, record in records.items():
        there = {field.name for field in fields(record)}
        read = {option.name for option in options.installed_options() if option.of == of}
        assert read <= there
        # What cannot be said in a file: functions, dtypes, process groups.
        assert len(there - read) < 40
        assert not {name for name in there - read if name.startswith(("moe_", "recompute_", "adam_"))}


def test_what_the_run_decides_is_refused():
    with pytest.raises(ValidationError, match=r"decided by the model's config\.json"):
        Megatron.Config(num_layers=12)
    with pytest.raises(ValidationError, match=r"decided by train\.lr"):
        Megatron.Config(lr=1e-3)


def test_an_unknown_option_has_its_nearest_match():
    registry = Registry()
    resolved = registry.resolve("slime.backends", "megatron", where="backend.name")
    with pytest.raises(
        ConfigError, match=r"backend\.recompute_granulrity: unknown option; close match: recompute_granularity"
    ):
        bind(resolved, {"recompute_granulrity": "full"}, where="backend")


def test_binding_imports_no_megatron():
    script = (
        "import sys; from slime_megatron.plugin import Megatron; Megatron.Config(moe_z_loss_coeff=0.1);"
        "print([m for m in ('torch', 'megatron', 'megatron.core') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_megatron_its_installation_is_told(monkeypatch):
    monkeypatch.setattr(plugin, "megatron_folder", lambda: None)
    problems = Megatron.problems(Megatron.Config(), 1, MODEL)
    assert any('pip install "slime-megatron[core]"' in problem for problem in problems)


def test_all_problems_at_once():
    config = Megatron.Config(tensor_model_parallel_size=3, pipeline_model_parallel_size=3, fp16=True, bf16=True)
    problems = Megatron.problems(config, 7, {**MODEL, "model_type": "quen3"})
    text = "\n".join(problems)
    for told in (
        "choose one of them",
        "no bridge for this family; close: qwen3",
        "4 attention heads",
        "4 layers",
        "the 7 ranks",
    ):
        assert told in text


def test_what_megatron_itself_refuses(tmp_path):
    from families import make_family

    from slime_core.testing.tiny_training import Place, opened

    folder = make_family(tmp_path / "model", "qwen3")
    backend = Megatron.build(Megatron.Config(recompute_granularity="some"))
    with pytest.raises(ConfigError, match="Megatron refuses these options"):
        opened(backend, Place(model=folder)).__enter__()
    backend.close()
