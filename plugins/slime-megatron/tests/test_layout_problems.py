"""Problems of layouts that do not fit are reported all at once, with values that do."""

import re

import pytest

from slime_megatron.layout import ParallelDims, ranks_of, shape_problems
from slime_megatron.plugin import Megatron
from slime_megatron.stages import Stages, proposal, read_layout, stage_problems

MODEL = {
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 10,
    "num_experts": 6,
    "moe_intermediate_size": 24,
}


def test_a_layout_that_fits():
    shape = ParallelDims(tp=2, pp=5, cp=2, ep=2, etp=2, sequence_parallel=True)
    assert shape_problems(shape, 40, MODEL) == []
    assert ranks_of(shape) == 20


def test_every_problem_is_reported():
    shape = ParallelDims(tp=8, pp=4, ep=4, etp=8, sequence_parallel=False)
    text = "\n".join(shape_problems(shape, 30, MODEL))
    assert (
        "tensor_model_parallel_size = 8: does not divide the model's 12 attention heads; the nearest that do: 6 or 12"
        in text
    )
    assert "10 layers; the nearest that do: 2 or 5 pieces" in text
    assert "expert_model_parallel_size = 4: does not divide the model's 6 experts; the nearest that do: 3 or 6" in text
    assert "with experts Megatron requires sequence_parallel = true" in text
    assert "8 x 4 x 1 = 32: does not divide the 30 ranks; the nearest numbers of ranks: 32" in text


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (ParallelDims(vpp=2), "requires a pipeline_model_parallel_size of at least 2"),
        (
            ParallelDims(tp=4, pp=2, vpp=3, sequence_parallel=True, etp=4),
            "6 pieces do not divide the model's 10 layers",
        ),
    ],
)
def test_single_problems(shape, expected):
    assert any(expected in problem for problem in shape_problems(shape, 8, MODEL))


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_attention_heads": 128,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "intermediate_size": 18432,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
}
LAYOUT = {"tensor_model_parallel_size": 8, "sequence_parallel": True, "expert_tensor_parallel_size": 1}


@pytest.mark.megatron
@pytest.mark.parametrize(
    "options",
    [
        {"num_layers_in_last_pipeline_stage": 13},
        {"num_layers_in_first_pipeline_stage": 15, "num_layers_in_last_pipeline_stage": 14},
        {"account_for_embedding_in_pipeline_split": True, "virtual_pipeline_model_parallel_size": 31, "pp": 2},
        {"pipeline_model_parallel_layout": "Et*16|(t*15|)*2t*15L"},
        {"pipeline_model_parallel_layout": [["embedding"], *[["decoder"] * 30] * 2, ["decoder", "loss"]]},
    ],
)
def test_stages_may_differ(options):
    """61 layers, as DeepSeek-V3 has."""
    pp = options.get("pp", 4)
    others = {name: value for name, value in options.items() if name != "pp"}
    config = Megatron.Config(**LAYOUT, pipeline_model_parallel_size=pp, **others)
    assert Megatron.problems(config, 64, DEEPSEEK_V3) == []
    assert set(others) <= Megatron.layout_options


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {},
            r"61 layers; the nearest that do: 1 or 61 pieces\. Or set num_layers_in_last_pipeline_stage = 13: the other",
        ),
        (
            {"num_layers_in_last_pipeline_stage": 14},
            r"leaves 47 of the model's 61 layers for 3 other stages; the nearest values of .*_last_\S+ that fit: 13 or 16",
        ),
        ({"num_layers_in_first_pipeline_stage": 0}, "at least 1"),
        (
            {"account_for_embedding_in_pipeline_split": True, "num_layers_in_last_pipeline_stage": 13},
            "num_layers_in_last_pipeline_stage and account_for_embedding_in_pipeline_split: these are different ways",
        ),
        ({"account_for_loss_in_pipeline_split": True}, "61 layers and 1 more; the nearest that do: 2 or 31 pieces"),
        ({"pipeline_model_parallel_layout": "Ettt"}, r"as in .Ett\|tt\|tt\|ttL"),
        ({"pipeline_model_parallel_layout": "Ex"}, r"as in .Ett\|tt\|tt\|ttL"),
        ({"pipeline_model_parallel_layout": "Et*16|t*15|t*15|t*15mL"}, "Leave m"),
        ({"pipeline_model_parallel_layout": "Et*60|L"}, "has 2 pieces.* requires 4"),
        ({"pipeline_model_parallel_layout": "E|t*60||L"}, "has 60 layers .t., and the model 61"),
        (
            {"pipeline_model_parallel_layout": "Et*8|(t*8|)*3(t*7|)*3t*8L"},
            "has 8 pieces.*set virtual_pipeline_model_parallel_size = 2",
        ),
    ],
)
def test_stages_that_do_not_add_up(options, expected):
    assert re.search(expected, "\n".join(stage_problems(Stages(**options), 4, 1, 61)))


def test_proposed_stages_fit():
    for layers in range(1, 40):
        for pp, vpp in ((2, 1), (3, 1), (4, 1), (2, 2), (4, 2), (3, 3)):
            if layers < pp * vpp or layers % (pp * vpp) == 0:
                continue
            name, value = re.search(r"Or set (\w+) = (\d+|\S+\")[.:]", proposal(pp, vpp, layers)).groups()
            given = Stages(**{name: int(value) if value.isdigit() else value.strip('"')})
            assert stage_problems(given, pp, vpp, layers) == []


@pytest.mark.megatron
def test_a_layout_is_read_as_megatron_does():
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    for text in ("Et*3|(tt|)*29,m|L", "E|(tt|)*2,(t|)*4,mL", "Ettt|tL"):
        theirs = PipelineParallelLayerLayout.parse_str_to_list(text)
        assert read_layout(text) == [[layer.name for layer in piece] for piece in theirs]


def test_key_value_heads():
    """One of the two numbers must divide the other, as in Megatron."""
    (problem,) = shape_problems(ParallelDims(tp=6), 6, {"num_attention_heads": 12, "num_key_value_heads": 4})
    assert "tensor_model_parallel_size = 6: ranks share the model's 4 key-value heads" in problem
    assert "the nearest that do: 4 or 12" in problem
    for tp in (2, 4, 12):
        assert shape_problems(ParallelDims(tp=tp), tp, {"num_attention_heads": 12, "num_key_value_heads": 4}) == []


def test_experts_of_a_dense_model():
    dense = {key: value for key, value in MODEL.items() if "expert" not in key}
    assert any("has no experts" in problem for problem in shape_problems(ParallelDims(ep=2), 2, dense))
    assert shape_problems(ParallelDims(tp=2), 2, dense) == []


def test_another_key_for_the_number_of_experts():
    """transformers 5 writes this key for Qwen3-MoE."""
    other = {{"num_experts": "num_local_experts"}.get(key, key): value for key, value in MODEL.items()}
    assert shape_problems(ParallelDims(ep=2), 2, other) == []
    assert any(
        "does not divide the model's 6 experts" in problem for problem in shape_problems(ParallelDims(ep=4), 4, other)
    )


def test_heads_of_linear_attention():
    linear = {**MODEL, "linear_num_key_heads": 4}
    assert shape_problems(ParallelDims(tp=2, cp=2, sequence_parallel=True, etp=2), 4, linear) == []
    (problem,) = shape_problems(ParallelDims(tp=2, cp=4, sequence_parallel=True, etp=2), 8, linear)
    assert "tensor_model_parallel_size x context_parallel_size = 8: ranks share the model's 4 key heads" in problem
    assert "the nearest that do: 4" in problem
