"""`slime config`: the schema of a run file, and what a key does."""

import json

import jsonschema
import pytest
from typer.testing import CliRunner

from slime_core.errors import ConfigError, PluginError
from slime_preflight.cli.config import app
from slime_preflight.explain import explain_key, list_keys
from slime_preflight.schema import run_schema

CHOSEN = {"algo": "gspo", "reward": "math"}


def test_the_schema_is_valid_and_takes_what_the_binding_takes():
    schema = run_schema(CHOSEN)
    validator = jsonschema.Draft202012Validator
    validator.check_schema(schema)
    file = {
        "name": "a",
        "model": {"hf_checkpoint": "base"},
        "data": {"prompt_data": ["train.jsonl"]},
        "backend": "fake",
        "engine": {"name": "fake", "mem_fraction_static": 0.5},
        "reward": {"name": "math", "max_symbolic_chars": 3},
        "algo": {"name": "gspo", "eps_clip": 0.1, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "aggregation": "seq_mean"},
        "rollout": {
            "rollout_batch_size": 1,
            "rollout_max_response_len": 4,
            "filters": ["nonzero_std", {"name": "length"}],
        },
        "train": {"num_rollout": 1, "lr": 1e-4},
        "eval": {"datasets": {"held_out": {"path": "x", "reward": "math"}}},
        "trackers": ["jsonl", {"name": "tensorboard"}],
    }

    def wrong(**changes):
        return [error.message for error in validator(schema).iter_errors({**file, **changes})]

    assert wrong() == []
    assert wrong(algo="gspo", reward="math") == []
    assert wrong(algo={"name": "gspo", "eps_clipp": 0.1})
    assert wrong(algo={"name": "grpo"})
    assert wrong(train={"num_rollout": 1, "lrr": 1})
    assert wrong(train={"num_rollout": "many"})
    assert wrong(model={})
    assert wrong(trackers=[{"folder": "x"}])
    algo = schema["$defs"]["algo_gspo"]
    assert algo["properties"]["eps_clip"]["default"] == 3e-4
    assert "Weight of the KL term" in algo["properties"]["kl_loss_coef"]["description"]
    assert algo["properties"]["name"] == {"const": "gspo"}


def test_the_schema_of_an_unknown_plugin():
    with pytest.raises(PluginError, match="close match: gspo"):
        run_schema({"algo": "gsp0"})


@pytest.mark.parametrize("key", ["lr", "--lr", "train.lr", "--train.lr"])
def test_explaining_a_kernel_key(key):
    text = explain_key(key, CHOSEN)
    assert text.startswith("train.lr\n")
    for part in ("flag     --lr", "type     float, gt=0", "default  1e-06", "owner    slime", "Highest learning rate."):
        assert part in text


def test_explaining_a_plugins_key():
    text = explain_key("eps-clip", {"algo": "gspo"})
    assert "default  0.0003" in text
    assert "owner    sequence_clip (slime-grpo" in text
    everywhere = explain_key("algo.eps_clip", {})
    assert everywhere.count("algo.eps_clip\n") == 3  # clip, sequence_clip, cispo


def test_explaining_what_is_not_there():
    with pytest.raises(ConfigError, match=r"train\.lrr: unknown key; close match: train\.lr"):
        explain_key("train.lrr", CHOSEN)


def test_the_list_of_keys_has_every_key_once():
    lines = list_keys(CHOSEN).splitlines()
    keys = [line.split()[0] for line in lines]
    assert {"train.lr", "algo.eps_clip", "algo.kl_loss_coef", "rollout.filters", "reward.max_symbolic_chars"} <= set(
        keys
    )
    assert len(keys) == len(set(keys))


PLUGIN = '''
from pydantic import Field

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.generator import GeneratorDriver
from slime_core.plugin import driver


class QuickConfig(DriverConfig):
    deep: int = Field(3, gt=0)
    """How deep."""


@driver("slime.generators", "quick")
class Quick(GeneratorDriver):
    Config = QuickConfig

    @classmethod
    def build(cls, config):
        raise AssertionError("nothing is built")
'''


@pytest.mark.parametrize("chosen", [{}, {"generate": "quick"}])
def test_options_of_a_generator_in_a_plugin_file(tmp_path, chosen):
    (tmp_path / "quick.py").write_text(PLUGIN)
    text = explain_key("generate.deep", chosen, [tmp_path / "quick.py"])
    assert "owner    quick (quick.py" in text
    assert "How deep." in text
    with pytest.raises((ConfigError, PluginError)):
        explain_key("generate.deep", chosen)


def test_a_broken_plugin_hides_no_keys(tmp_path):
    (tmp_path / "quick.py").write_text(PLUGIN.replace("Quick(GeneratorDriver)", "Quick"))
    assert explain_key("generate.command", {}, [tmp_path / "quick.py"]).startswith("generate.command\n")


def test_the_commands_take_plugin_files(tmp_path):
    (tmp_path / "quick.py").write_text(PLUGIN)
    words = ["--plugin", str(tmp_path / "quick.py"), "--generate", "quick"]
    assert "How deep." in CliRunner().invoke(app, ["explain", "generate.deep", *words]).stdout
    schema = json.loads(CliRunner().invoke(app, ["schema", *words]).stdout)
    assert schema["$defs"]["generate_quick"]["properties"]["deep"]["default"] == 3
