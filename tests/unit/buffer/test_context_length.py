"""How long the sequences are that a model reads, by its config.json."""

import pytest

from slime_core.data.model_folder import context_length

YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 512}, "max_position_embeddings": 9}, 512),
        ({}, None),
        ({"max_position_embeddings": None}, None),
        ({"max_position_embeddings": -1}, None),
        # Yarn: of Qwen, whose config keeps the length before, and of DeepSeek, whose config has the one after.
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 131072),
        (
            {"max_position_embeddings": 32768, "rope_parameters": YARN | {"original_max_position_embeddings": 32768}},
            131072,
        ),
        (
            {
                "max_position_embeddings": 163840,
                "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
            },
            163840,
        ),
        # Llama 3 and Gemma 3: the length after is in the config.
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 131072),
        ({"max_position_embeddings": 64, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, 64),
    ],
)
def test_the_longest_sequence(config, expected):
    assert context_length(config) == expected
