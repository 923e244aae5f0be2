"""Layouts that do not fit are told all at once, with what would."""

import pytest

from slime_megatron.layout import Shape, ranks_of, shape_problems

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
    shape = Shape(tp=2, pp=5, cp=2, ep=2, etp=2, sequence_parallel=True)
    assert shape_problems(shape, 40, MODEL) == []
    assert ranks_of(shape) == 20


def test_every_problem_is_told():
    shape = Shape(tp=8, pp=4, ep=4, etp=8, sequence_parallel=False)
    text = "\n".join(shape_problems(shape, 30, MODEL))
    assert (
        "tensor_model_parallel_size = 8: does not divide the model's 12 attention heads; the nearest that do: 6 or 12"
        in text
    )
    assert "10 layers; the nearest that do: 2 or 5 pieces" in text
    assert "expert_model_parallel_size = 4: does not divide the model's 6 experts; the nearest that do: 3 or 6" in text
    assert "with experts Megatron wants sequence_parallel = true" in text
    assert "8 x 4 x 1 = 32: does not divide the 30 ranks; the nearest numbers of ranks: 32" in text


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        (Shape(sequence_parallel=True), "sequence_parallel = true: needs a tensor_model_parallel_size of at least 2"),
        (Shape(vpp=2), "needs a pipeline_model_parallel_size of at least 2"),
        (Shape(tp=4, pp=2, vpp=3, sequence_parallel=True, etp=4), "6 pieces do not divide the model's 10 layers"),
    ],
)
def test_single_problems(shape, told):
    assert any(told in problem for problem in shape_problems(shape, 8, MODEL))


def test_experts_of_a_dense_model():
    dense = {key: value for key, value in MODEL.items() if "expert" not in key}
    assert any("has no experts" in problem for problem in shape_problems(Shape(ep=2), 2, dense))
    assert shape_problems(Shape(tp=2), 2, dense) == []


def test_another_word_for_experts():
    """transformers 5 writes it for Qwen3-MoE."""
    other = {{"num_experts": "num_local_experts"}.get(key, key): value for key, value in MODEL.items()}
    assert shape_problems(Shape(ep=2), 2, other) == []
    assert any("does not divide the model's 6 experts" in problem for problem in shape_problems(Shape(ep=4), 4, other))


def test_heads_of_linear_attention():
    linear = {**MODEL, "linear_num_key_heads": 4}
    assert shape_problems(Shape(tp=2, cp=2, sequence_parallel=True, etp=2), 4, linear) == []
    (told,) = shape_problems(Shape(tp=2, cp=4, sequence_parallel=True, etp=2), 8, linear)
    assert "tensor_model_parallel_size x context_parallel_size = 8: ranks share the model's 4 key heads" in told
    assert "the nearest that do: 4" in told
