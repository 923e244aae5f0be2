"""Tiny random models in temporary folders, and the engine on them."""

import sys
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from slime_core.contracts.setup import EngineSetup
from slime_local.plugin import Local

# The suite is collected with importlib, which does not put its folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

VOCAB = 31
EOS = 2


def small(config_class, **options):
    return config_class(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        eos_token_id=EOS,
        bos_token_id=1,
        pad_token_id=0,
        initializer_range=0.35,
        **options,
    )


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory):
    torch.manual_seed(11)
    folder = tmp_path_factory.mktemp("qwen3")
    Qwen3ForCausalLM(small(Qwen3Config, tie_word_embeddings=True)).save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCAB - 1)} | {"[UNK]": VOCAB - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    torch.manual_seed(12)
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(small(LlamaConfig, tie_word_embeddings=False)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def qwen3_moe(tmp_path_factory):
    torch.manual_seed(13)
    folder = tmp_path_factory.mktemp("qwen3_moe")
    config = small(Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def minimax_m2(tmp_path_factory):
    torch.manual_seed(14)
    folder = tmp_path_factory.mktemp("minimax_m2")
    rotary = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    config = small(MiniMaxM2Config, num_local_experts=4, num_experts_per_tok=2, rope_parameters=rotary)
    MiniMaxM2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest_asyncio.fixture
async def engines():
    """`await engines(folder, **options)` starts one; all are stopped at the end."""
    started = []

    async def start(folder, *, max_context_len=128, max_batch=64, index=0, **options):
        engine = Local.build(Local.Config(**options))
        setup = EngineSetup(
            index=index,
            model_path=folder,
            device="cpu",
            seed=0,
            max_context_len=max_context_len,
            max_batch=max_batch,
            run_dir=folder,
        )
        await engine.start(setup)
        started.append(engine)
        return engine

    yield start
    for engine in started:
        await engine.stop()
