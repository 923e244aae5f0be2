"""Gated delta nets in chunks, against the recurrence token by token in float64."""

import numpy as np
import pytest
import torch

from slime_training.delta_rule import causal_conv, gated_delta_rule, plan_recurrence

LENGTHS = (5, 1, 0, 13, 4, 8)
TOKENS, KEYS, VALUES = sum(LENGTHS), 2, 4
CPU = torch.device("cpu")


def spans():
    ends = np.cumsum(LENGTHS)
    return [range(end - length, end) for end, length in zip(ends, LENGTHS, strict=True)]


def by_token(q, k, v, decay, strength):
    rows = []
    for span in spans():
        state = torch.zeros(VALUES, k.shape[-1], v.shape[-1], dtype=torch.float64)
        for t in span:
            now = []
            for head in range(VALUES):
                of_keys = head * KEYS // VALUES
                query, key = q[t, of_keys], k[t, of_keys]
                query = query / (query @ query + 1e-6).sqrt() / len(query) ** 0.5
                key = key / (key @ key + 1e-6).sqrt()
                held = decay[t, head].exp() * state[head]
                now.append((held + strength[t, head] * torch.outer(key, v[t, head] - key @ held), query))
            state = torch.stack([of_head for of_head, _ in now])
            rows.append(torch.stack([query @ of_head for of_head, query in now]))
    return torch.stack(rows)


def inputs(dtype):
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    exact = [
        random(TOKENS, KEYS, 6),
        random(TOKENS, KEYS, 6),
        random(TOKENS, VALUES, 5),
        -2 * random(TOKENS, VALUES).abs(),
        random(TOKENS, VALUES).sigmoid(),
    ]
    return [x.clone().to(dtype).requires_grad_() for x in exact]


@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_chunks_equal_the_recurrence(chunk, dtype, tolerance):
    exact, given = inputs(torch.float64), inputs(dtype)
    weight = torch.randn(TOKENS, VALUES, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    expected = by_token(*exact)
    found = gated_delta_rule(*given, plan_recurrence(np.array(LENGTHS), CPU, chunk))
    assert found.dtype == dtype
    assert float((found - expected).abs().max()) < tolerance
    (expected * weight).sum().backward()
    (found * weight.to(dtype)).sum().backward()
    for one, other in zip(given, exact, strict=True):
        assert float((one.grad - other.grad).abs().max()) < tolerance


def test_the_convolution_stays_in_its_sequence():
    generator = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((TOKENS, 3), (3, 4)))
    found = causal_conv(x, weight, plan_recurrence(np.array(LENGTHS), CPU))
    for span in spans():
        for t in span:
            total = sum(weight[:, 3 - back] * x[t - back] for back in range(4) if t - back in span)
            assert torch.allclose(found[t], total / (1 + (-total).exp()), atol=1e-12)
