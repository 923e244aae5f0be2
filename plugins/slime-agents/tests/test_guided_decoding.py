"""Constrained responses of a real SGLang server: their form, and of which distribution their log-probs are."""

import asyncio
import json

import numpy as np
import openai
import pytest
import torch
from agents_played import HERMES
from agents_speaker import episode_with

from slime_agents.config import AgentConfig
from slime_agents.served.agents import FunctionAgent
from slime_agents.served.constraint import Constraint
from slime_agents.served.generator import ServedAgent
from slime_core.contracts.engine import Capability
from slime_core.contracts.setup import EngineSetup
from slime_models.new_model import ModelSizes, new_model

pytestmark = pytest.mark.sglang

SIZES = ModelSizes(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=32, max_length=1024)
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "dark": {"type": "boolean"}},
    "required": ["colour", "dark"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "paint", "parameters": COLOUR}},
    {"type": "function", "function": {"name": "rest", "parameters": {"type": "object", "additionalProperties": False}}},
]
FORMAT = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR, "strict": True}}


def masked_log_probs(folder, sample, structural_tag):
    """Log-probs of the response's tokens: of transformers' distribution, and of what XGrammar leaves of it."""
    import xgrammar
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    size = model.config.vocab_size
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size, stop_token_ids=[tokenizer.eos_token_id])
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_structural_tag(structural_tag))
    mask = xgrammar.allocate_token_bitmask(1, size)
    tokens = torch.tensor(sample.tokens.tolist())
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, sample.prompt_length - 1 : -1].double()
    whole = logits.log_softmax(-1)
    for row, token in zip(logits, sample.response_tokens.tolist(), strict=True):
        matcher.fill_next_token_bitmask(mask)
        allowed = [bool(mask[0, place // 32] >> (place % 32) & 1) for place in range(size)]
        row[~torch.tensor(allowed)] = -torch.inf
        assert matcher.accept_token(token)
    at = torch.arange(len(logits)), tokens[sample.prompt_length :]
    return logits.log_softmax(-1)[at].numpy(), whole[at].numpy()


def test_a_format_beside_tools_is_a_text_or_calls():
    import xgrammar

    text = Constraint.of_format("response_format", FORMAT, COLOUR, TOOLS).structural_tag
    info = xgrammar.TokenizerInfo([*map(chr, range(32, 127)), "\n", "<end>"], stop_token_ids=[96])
    compiled = xgrammar.GrammarCompiler(info).compile_structural_tag(text)

    def is_accepted(written):
        matcher = xgrammar.GrammarMatcher(compiled)
        return matcher.accept_string(written) and matcher.accept_token(96)

    colour = '{"colour": "red", "dark": true}'
    call = f'<tool_call>\n{{"name": "paint", "arguments": {colour}}}\n</tool_call>'
    rest = '<tool_call>\n{"name": "rest", "arguments": {}}\n</tool_call>'
    assert all(map(is_accepted, (colour, call, rest, f"{call}\n{rest}")))
    assert not any(
        map(is_accepted, ("red", '{"colour": "blue", "dark": true}', call.replace("paint", "dance"), f"I {call}"))
    )


def test_constrained_responses_and_their_log_probs(tmp_path):
    from transformers import AutoTokenizer

    from slime_sglang.plugin import Sglang

    alphabet = "".join(map(chr, range(33, 127))) + "\n "
    new_model(tmp_path / "base", "qwen3", SIZES, alphabet=alphabet, chat_template=HERMES, initializer_range=0.3)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    read = []

    async def painter(task):
        messages = [{"role": "user", "content": "Paint."}]
        async with openai.AsyncOpenAI(
            base_url=task.base_url, api_key=task.api_key, max_retries=0, timeout=300
        ) as opened:
            for options in (
                {"response_format": FORMAT},
                {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
                {
                    "tools": TOOLS,
                    "tool_choice": {"type": "function", "function": {"name": "paint"}},
                    "parallel_tool_calls": False,
                },
            ):
                response = await opened.chat.completions.create(model="m", messages=messages, **options)
                read.append(response.choices[0])
            broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no type"}}}
            with pytest.raises(openai.BadRequestError, match=r"response_format = .*: not supported here.*The engine: "):
                await opened.chat.completions.create(model="m", messages=messages, response_format=broken)
        return 1.0

    async def scene():
        engine = Sglang.build(Sglang.Config(start_timeout=900, grammar_backend="xgrammar"))
        generator = ServedAgent(FunctionAgent(painter), AgentConfig())
        setup = EngineSetup(
            model_path=tmp_path / "base",
            run_dir=tmp_path,
            index=0,
            device="cpu",
            seed=0,
            max_context_len=1000,
            max_batch=4,
        )
        try:
            info = await engine.start(setup)
            assert Capability.STRUCTURAL_TAG in info.capabilities
            return await generator.generate(episode_with(engine, tokenizer=tokenizer, budget=400))
        finally:
            await generator.close()
            await engine.stop()

    samples = asyncio.run(scene())
    assert [choice.finish_reason for choice in read] == ["stop", "tool_calls", "tool_calls"]
    for text in (read[0].message.content, read[2].message.tool_calls[0].function.arguments):
        found = json.loads(text)
        assert (sorted(found), found["colour"] in ("red", "green"), type(found["dark"])) == (
            ["colour", "dark"],
            True,
            bool,
        )
    assert [len(choice.message.tool_calls or ()) for choice in read] == [0, 1, 1]
    assert read[1].message.tool_calls[0].function.name in ("paint", "rest")
    assert [sample.counts["agent_constrained"] for sample in samples[:3]] == [1, 1, 1]
    asked = [
        Constraint.of_format("response_format", FORMAT, COLOUR, None),
        Constraint.of_calls("required", TOOLS, name=None, one=True),
        Constraint.of_calls({}, TOOLS, name="paint", one=True),
    ]
    for sample, constraint in zip(samples, asked, strict=False):
        masked, whole = masked_log_probs(tmp_path / "base", sample, constraint.structural_tag)
        np.testing.assert_allclose(sample.rollout_log_probs, masked, atol=1e-4)
        # What the trainer computes for the same tokens is lower: most of this model's probability is on other tokens.
        assert (whole <= masked + 1e-6).all()
        assert (masked - whole).sum() > 10
