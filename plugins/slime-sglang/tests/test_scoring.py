"""Log-probs of given tokens: what is accepted as the response."""

import numpy as np
import pytest
import torch

from slime_core.errors import EngineError
from slime_sglang.scoring import scored


def reply(ids):
    return {"meta_info": {"input_token_logprobs": [[None, 9, None], *([-0.5, token, None] for token in ids)]}}


@pytest.mark.parametrize(
    ("tokens", "returned", "right"),
    [
        ([1, 3, 4, 2], [3, 4, 2], True),
        ([1, 3, 4, 2], [3, 0, 2], True),
        ([1, 4, 3, 4], [0, 3, 0], True),
        ([5, 4, 3, 2], [0, 3, 2], False),
        ([1, 3, 4, 2], [0, 0, 2], False),
        ([1, 3, 4, 2], [3, 5, 2], False),
        ([1, 3, 4, 2], [3, 4], False),
    ],
)
def test_sglang_calls_the_last_token_of_its_vocabulary_0(tokens, returned, right):
    """It clips image tokens, and with them the last token of the vocabulary; the log-prob is that token's own."""
    asked = np.array(tokens, np.int32)
    if right:
        assert scored(reply(returned), asked, 3, "engine 0").tolist() == [-0.5] * 3
    else:
        with pytest.raises(EngineError, match="log-probs of 3 tokens were requested"):
            scored(reply(returned), asked, 3, "engine 0")


@pytest.mark.sglang
async def test_every_token_has_its_log_prob(attached, tiny, tmp_path):
    from engine_setup import setup_for
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny).eval()
    last = model.config.vocab_size - 1
    tokens = torch.randint(0, last + 1, (8, 12), generator=torch.Generator().manual_seed(1))
    tokens[:, 8] = last
    with torch.no_grad():
        expected = model(tokens).logits.log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None])[..., 0][:, -6:]
    engine = attached()
    await engine.start(setup_for(tiny, tmp_path))
    try:
        found = await engine.score(list(tokens.numpy().astype(np.int32)), [6] * len(tokens))
    finally:
        await engine.stop()
    assert np.allclose(np.stack(found), expected.numpy(), atol=1e-4)
