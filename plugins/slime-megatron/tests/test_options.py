"""Options of the installed Megatron under its own names."""

import subprocess
import sys
from typing import Literal

import pytest
from pydantic import ValidationError

from slime_core.errors import ConfigError
from slime_core.registry import Registry
from slime_core.registry.options import bind
from slime_megatron import config as backend_config
from slime_megatron import options
from slime_megatron.config import MegatronOptions, megatron_options, refusal_of
from slime_megatron.plugin import Megatron
from slime_megatron.unsupported_options import megatron_errors

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
        # What cannot be set in a run file: functions, dtypes, process groups.
        assert len(there - read) < 40
        assert not {name for name in there - read if name.startswith(("moe_", "recompute_", "adam_"))}


def test_options_that_the_run_sets_are_refused():
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


def test_without_megatron_the_error_has_its_installation(monkeypatch):
    monkeypatch.setattr(backend_config, "megatron_folder", lambda: None)
    problems = Megatron.problems(Megatron.Config(), 1, MODEL)
    assert any('pip install "slime-megatron[core]"' in problem for problem in problems)


def test_all_problems_at_once():
    config = Megatron.Config(tensor_model_parallel_size=3, pipeline_model_parallel_size=3, fp16=True, bf16=True)
    problems = Megatron.problems(config, 7, {**MODEL, "model_type": "quen3"})
    text = "\n".join(problems)
    for expected in (
        "they exclude each other",
        "no bridge for this family; close: qwen3",
        "4 attention heads",
        "4 layers",
        "the 7 ranks",
    ):
        assert expected in text


def test_what_megatron_itself_refuses(tmp_path):
    """Options that Megatron checks when it creates its records and when it builds the model."""
    from families import make_family

    from slime_core.contracts.optimizer import OptimizerConfig
    from slime_plugin_kit.tiny_training import Place, opened

    folder = make_family(tmp_path / "model", "qwen3")
    for asked, expected in (
        ({"recompute_granularity": "full"}, "recompute_method must be.*Given: backend.recompute_granularity = full"),
        ({"gradient_accumulation_fusion": True}, "APEX.*Given: backend.gradient_accumulation_fusion = True"),
        ({"use_precision_aware_optimizer": True}, "distributed optimizer"),
        ({"moe_router_bias_update_rate": 0.1}, "routers of this family have no bias"),
        ({"sgd_momentum": 0.5}, "it has no sgd_momentum"),
    ):
        backend = Megatron.build(Megatron.Config(**asked))
        with pytest.raises(ConfigError, match=expected):
            opened(backend, Place(model=folder), optimizer=OptimizerConfig()).__enter__()
        backend.close()


def test_errors_that_are_not_about_options_are_unchanged():
    import torch
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    with pytest.raises(ConfigError, match="Invalid layer character"), megatron_errors({}, options.megatron_folder()):
        PipelineParallelLayerLayout.parse_str_to_list("x")
    for error in (torch.OutOfMemoryError("full"), RuntimeError("ours")):
        with pytest.raises(type(error), match=str(error)), megatron_errors({}, options.megatron_folder()):
            raise error


EXPERTS = {**MODEL, "model_type": "deepseek_v3", "n_routed_experts": 8}
FULL, SELECTIVE = {"recompute_granularity": "full"}, {"recompute_granularity": "selective"}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
FLEX = {"moe_token_dispatcher_type": "flex"}
OFFLOADED = {"optimizer_cpu_offload": True}
BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
TAKEN = {
    # The placement of layers: tested in test_layout_problems.py and test_layouts.py.
    "num_layers_in_first_pipeline_stage": (1, PP2),
    "num_layers_in_last_pipeline_stage": (1, PP2),
    "pipeline_model_parallel_layout": ("Et|tttL", PP2),
    "account_for_embedding_in_pipeline_split": (True, {**PP2, "account_for_loss_in_pipeline_split": True}),
    "account_for_loss_in_pipeline_split": (True, {**PP2, "account_for_embedding_in_pipeline_split": True}),
    # Communication of ranks: the same gradients.
    "batch_p2p_sync": (False, PP2),
    "deallocate_pipeline_outputs": (True, PP2),
    "overlap_p2p_comm_warmup_flush": (True, VPP2),
    "clone_scatter_output_in_embedding": (False, {}),
    "moe_token_dispatcher_type": ("flex", {}),
    "moe_enable_deepep": (True, FLEX),
    "moe_flex_dispatcher_backend": ("hybridep", FLEX),
    "moe_deepep_num_sms": (8, FLEX),
    "moe_hybridep_num_sms": (8, FLEX),
    "moe_shared_expert_overlap": (True, {}),
    "grad_reduce_in_fp32": (False, {}),
    "overlap_grad_reduce": (True, {}),
    "bucket_size": (100, {}),
    "pad_buckets_for_high_nccl_busbw": (True, {}),
    "reduce_scatter_with_fp32_accumulation": (True, {}),
    # Recomputation.
    "recompute_granularity": ("full", {}),
    "recompute_method": ("uniform", FULL),
    "recompute_num_layers": (2, FULL),
    "distribute_saved_activations": (True, FULL),
    "recompute_modules": (["mlp", "moe"], SELECTIVE),
    "moe_layer_recompute": (True, {}),
    # Fusion, which rounds differently.
    "bias_activation_fusion": (True, {}),
    "activation_func_fp8_input_store": (True, {"bias_activation_fusion": True}),
    "bias_dropout_fusion": (True, {}),
    "disable_bf16_reduced_precision_matmul": (True, {}),
    "gradient_accumulation_fusion": (True, {}),
    "moe_router_dtype": ("fp64", {}),
    # The format of layers in a checkpoint: tested in test_conversion.py.
    "hetereogenous_dist_checkpoint": (True, {}),
    # Other terms of the loss, which the run sets.
    "moe_router_load_balancing_type": ("aux_loss", BALANCED),
    "moe_aux_loss_coeff": (0.1, BALANCED),
    "moe_z_loss_coeff": (0.1, {}),
    "moe_router_bias_update_rate": (0.1, {}),
    # The optimizer.
    "decoupled_lr": (0.1, {}),
    "decoupled_min_lr": (0.1, {"decoupled_lr": 0.2}),
    "apply_wd_to_qk_layernorm": (True, {}),
    "decoupled_weight_decay": (False, {}),
    "sgd_momentum": (0.5, {}),
    "use_precision_aware_optimizer": (True, {}),
    "store_param_remainders": (False, {"use_precision_aware_optimizer": True}),
    "optimizer_cpu_offload": (True, {}),
    "optimizer_offload_fraction": (1.0, OFFLOADED),
    "use_torch_optimizer_for_cpu_offload": (True, OFFLOADED),
    "overlap_cpu_optimizer_d2h_h2d": (True, OFFLOADED),
    "pin_cpu_grads": (False, OFFLOADED),
    "pin_cpu_params": (False, OFFLOADED),
    "loss_scale": (8.0, {"fp16": True}),
    "initial_loss_scale": (8.0, {"fp16": True}),
    "min_loss_scale": (8.0, {"fp16": True}),
    "loss_scale_window": (8.0, {"fp16": True}),
    "hysteresis": (3, {"fp16": True}),
}
"""Options of Megatron that work here: a value other than the default, with the options that it requires."""
NOT_INSTALLED = {"moe_permute_fusion", "moe_router_fusion"}


def test_every_option_of_megatron_is_supported_or_refused():
    """A new option of a newer Megatron would be neither."""
    names = {option.name for option in options.installed_options()} - set(MegatronOptions.model_fields)
    refused = {name for name in names if refusal_of(name) is not None}
    assert sorted(refused | set(TAKEN) | NOT_INSTALLED) == sorted(names)
    assert not refused & set(TAKEN)
    for name in sorted(refused):
        with pytest.raises(ValidationError, match=f"{name}\n.*not an option of the backend: ..."):
            Megatron.Config(**{name: 7})
    for name, (value, beside) in TAKEN.items():
        config = Megatron.Config(**{**beside, name: value})
        assert Megatron.problems(config, 2, EXPERTS) == [], name
        assert any(megatron_options(config, of).get(name) == value for of in options.RECORDS), name
    (problem,) = Megatron.problems(Megatron.Config(moe_router_fusion=True), 2, EXPERTS)
    assert problem == (
        "backend.moe_router_fusion = true: requires Transformer Engine, which is not installed. Leave it out."
    )
    # Without it the result is the same, only slower.
    config = Megatron.Config(moe_permute_fusion=True)
    assert Megatron.problems(config, 2, EXPERTS) == []
    (notice,) = Megatron.notices(config)
    assert notice.startswith("backend.moe_permute_fusion = ")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"loss_scale": 8.0, "bf16": True}, "loss_scale: does nothing without backend.fp16 = true"),
        ({"recompute_modules": ["mlp"]}, "does nothing without backend.recompute_granularity = selective"),
        ({"decoupled_min_lr": 0.1}, "does nothing without backend.decoupled_lr"),
        ({**SELECTIVE, "recompute_modules": ["layernorm"]}, "requires Transformer Engine"),
        ({"moe_aux_loss_coeff": 0.1}, "without backend.moe_router_load_balancing_type = aux_loss"),
        ({**BALANCED, "moe_router_load_balancing_type": "global_aux_loss"}, "Set none or aux_loss or seq_aux_loss"),
        ({"moe_token_dispatcher_type": "allgather"}, "Set alltoall or flex"),
        ({"decoupled_weight_decay": False, "exp_avg_sq_dtype": "bf16"}, "the step is AdamW"),
    ],
)
def test_options_without_effect_are_refused(asked, expected):
    (problem,) = Megatron.problems(Megatron.Config(**asked), 2, EXPERTS)
    assert expected in problem


@pytest.mark.parametrize(
    ("asked", "name", "notice"),
    [
        (
            {"sequence_parallel": True},
            "sequence_parallel",
            "backend.sequence_parallel = true: tensor_model_parallel_size is 1, so it has no effect.",
        ),
        (
            {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.0},
            "moe_router_load_balancing_type",
            "backend.moe_router_load_balancing_type = seq_aux_loss: moe_aux_loss_coeff is 0, so it has no effect.",
        ),
        (
            {"moe_router_load_balancing_type": ["aux_loss", "none"]},
            "moe_router_load_balancing_type",
            "backend.moe_router_load_balancing_type = ['aux_loss', 'none']: moe_aux_loss_coeff is 0, so it has no effect.",
        ),
    ],
)
def test_options_that_change_nothing_are_named_and_not_passed(asked, name, notice):
    config = Megatron.Config(**asked)
    assert Megatron.problems(config, 2, EXPERTS) == []
    assert Megatron.notices(config) == [notice]
    assert name not in megatron_options(config, options.MODEL)
    assert not config.shape.sequence_parallel


def test_routing_without_a_loss_is_no_option_without_effect():
    config = Megatron.Config(moe_router_load_balancing_type="sinkhorn", moe_aux_loss_coeff=0.0)
    assert Megatron.notices(config) == []
    assert Megatron.problems(config, 2, EXPERTS)


def test_options_of_experts_require_experts():
    (problem,) = Megatron.problems(Megatron.Config(moe_z_loss_coeff=0.1), 1, MODEL)
    assert problem == "backend.moe_z_loss_coeff: the model has no experts. Leave it out."


def test_values_that_megatron_lists_are_checked_before_it_is_imported():
    registry = Registry()
    resolved = registry.resolve("slime.backends", "megatron", where="backend.name")
    with pytest.raises(ConfigError, match=r"backend\.recompute_granularity.*'full' or 'selective'"):
        bind(resolved, {"recompute_granularity": "some"}, where="backend")
    assert {option.name: option.type for option in options.installed_options()}["moe_router_dtype"] == Literal[
        "fp32", "fp64"
    ]
