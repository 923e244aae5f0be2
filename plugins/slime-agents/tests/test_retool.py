"""retool: what the model wrote is trained, what its code printed is not; limits; what the model reads of its output."""

from dataclasses import replace

import numpy as np
import pytest
from agents_speaker import TOKENIZER, decode

from slime_agents.config import RetoolConfig
from slime_agents.retool import Retool, ToolFailed
from slime_agents.sandbox import Execution, Outcome, SandboxConfig
from slime_core.types.sample import Status, VersionSpan

OPEN, CLOSE = "\n<interpreter>\n", "\n</interpreter>\n"


def retool(**options):
    return Retool(RetoolConfig(sandbox=SandboxConfig(workers=1), **options))


def turns(*texts):
    """The model's turns, by how often the interpreter has responded."""
    return lambda text: texts[min(text.count("</interpreter>"), len(texts) - 1)]


def pieces(sample):
    """Runs of the mask with their text."""
    cuts = np.flatnonzero(np.diff(sample.loss_mask.astype(int))) + 1
    parts = zip(np.split(sample.loss_mask, cuts), np.split(sample.response_tokens, cuts), strict=True)
    return [(int(mask[0]), decode(tokens)) for mask, tokens in parts]


def test_code_is_run_and_its_output_is_not_trained(speak):
    [sample], engine = speak(
        turns("think <code>print(6*7)</code> never read", "<code>\n```python\nx = 2\nprint(x)\n```\n</code>", "so 42"),
        retool(),
    )
    assert pieces(sample) == [
        (1, "think <code>print(6*7)</code>"),
        (0, f"{OPEN}42{CLOSE}"),
        (1, "<code>\n```python\nx = 2\nprint(x)\n```\n</code>"),
        (0, f"{OPEN}2{CLOSE}"),
        (1, "so 42<end>"),
    ]  # fmt: skip
    assert sample.status is Status.COMPLETED
    assert sample.counts == {"tool_calls": 2, "tool_ok": 2}
    assert sample.metadata["tool_calls"] == 2
    assert not sample.rollout_log_probs[sample.loss_mask == 0].any()
    assert (sample.rollout_log_probs[sample.loss_mask == 1] < 0).all()
    # Token in, token out: each request is the one before, its response, and the output.
    for before, completion, after in zip(engine.requests, engine.completions, engine.requests[1:], strict=False):
        begun = np.concatenate([before.token_ids, completion.token_ids])
        assert np.array_equal(after.token_ids[: len(begun)], begun)
    assert [request.sampling.max_new_tokens for request in engine.requests] == [
        400, 400 - 29 - len(OPEN + CLOSE) - 2, 400 - int(sample.response_length) + len("so 42") + 1,
    ]  # fmt: skip
    written = list(sample.spans)
    assert [decode(sample.response_tokens[s.start : s.end]) for s in written] == [
        text for mask, text in pieces(sample) if mask
    ]


@pytest.mark.parametrize(
    ("code", "shown", "count"),
    [
        ("1/0", "ZeroDivisionError: division by zero", "tool_wrong"),
        ("print(1)\nx", "1\nNameError: name 'x' is not defined", "tool_wrong"),
        ("while 1: pass", "more than 1 s of processor time", "tool_timeout"),
        ("pass", "", "tool_ok"),
        ("print('a' * 60)", "aaaaaaaaaaaaaaa...aaaaaaaaaaaaaaa", "tool_ok"),
        # The end token would end the turn; as text it cannot.
        ("print('<en' + 'd>')", "<end>", "tool_ok"),
    ],
)
def test_what_the_model_reads(speak, code, shown, count):
    limits = SandboxConfig(workers=1, cpu_s=1, wall_s=60)
    most = 30 if count == "tool_ok" else 60
    generator = Retool(RetoolConfig(sandbox=limits, max_output_chars=most))
    [sample], _ = speak(turns(f"<code>{code}</code>", "ok"), generator)
    (_, written, _) = (text for _, text in pieces(sample))
    assert written == f"{OPEN}{shown}{CLOSE}"
    assert sample.counts[count] == 1
    tool = sample.response_tokens[sample.loss_mask == 0]
    assert TOKENIZER.eos_token_id not in tool


def test_limits_end_a_response(speak):
    [sample], engine = speak(turns("<code>print(1)</code>"), retool(max_tool_calls=2))
    assert sample.status is Status.TRUNCATED
    assert (sample.counts["tool_calls"], len(engine.requests)) == (2, 3)
    # Neither a tool call nor a request is made beyond the budget of the whole response, the output counted.
    [sample], engine = speak(turns("<code>print(1)</code>"), retool(), budget=60)
    assert sample.status is Status.TRUNCATED
    assert [request.sampling.max_new_tokens for request in engine.requests] == [60, 7]
    [sample], _ = speak(turns("<code>print(1)</code>"), retool(), budget=12)
    assert (sample.status, sample.response, sample.counts) == (Status.TRUNCATED, "<code>print(", {})


def test_a_turn_without_a_code_block_ends_the_response(speak):
    for written in ("no code", "code> </code", "</code> it ends", "<code>1</code> and more"):
        [sample], _ = speak(lambda text, written=written: written, retool(code_end="</CODE>"))
        assert (sample.status, sample.raw_response) == (Status.COMPLETED, written + "<end>")
    [sample], _ = speak(turns("alone </code>"), retool())
    assert (sample.status, sample.response, sample.counts) == (Status.COMPLETED, "alone </code>", {})


def test_without_the_tool_nothing_is_run(speak):
    [sample], engine = speak(turns("<code>print(6*7)</code> so 41"), retool(tool=False))
    assert pieces(sample) == [(1, "<code>print(6*7)</code> so 41<end>")]
    assert engine.requests[0].sampling.stop == ()


def test_a_partial_rollout_continues_where_it_was(speak):
    written = turns("<code>print(6*7)</code>", "it is 42")
    [whole], _ = speak(written, retool())
    called = len("<code>print(6*7)</code>")
    # Broken off in the code, right after it, and after its output.
    for length in (called - 10, called, called + len(f"{OPEN}42{CLOSE}")):
        kept = replace(
            whole,
            tokens=whole.tokens[: whole.prompt_length + length],
            loss_mask=whole.loss_mask[:length],
            rollout_log_probs=whole.rollout_log_probs[:length],
            spans=(VersionSpan(1, 0, min(length, called)),),
            counts=whole.counts if length > called else {},
            status=Status.ABORTED,
        )
        rest = "<code>print(6*7)</code>"[length:]
        [sample], _ = speak(
            lambda text, rest=rest: written(text) if not rest or "</code>" in text else rest, retool(), kept=kept
        )
        assert np.array_equal(sample.tokens, whole.tokens)
        assert np.array_equal(sample.loss_mask, whole.loss_mask)
        assert sample.counts == whole.counts


def test_a_failed_sandbox_raises_tool_failed(speak, monkeypatch):
    generator = retool()

    async def broken(code):
        return Execution(outcome=Outcome.INFRA, reason="the sandbox's fork server died")

    monkeypatch.setattr(generator._interpreter, "run", broken)
    with pytest.raises(ToolFailed, match="fork server died"):
        speak(turns("<code>print(1)</code>"), generator)
