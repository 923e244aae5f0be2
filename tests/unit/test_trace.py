"""Where the time of samples goes: metrics of a step, and a line for each sample."""

import json

import pytest

from slime_core.rollout.trace import GroupTrace, ResponseTrace, RolloutTrace, Turn


def turn(number, *, queue, generate, tokens, cached=0, extra=None):
    return Turn(
        request_id=f"train/1/{number}",
        queue_s=queue,
        generate_s=generate,
        prompt_tokens=10,
        tokens=tokens,
        cached_tokens=cached,
        engine=0,
        finish="stop",
        extra=extra or {},
    )


def group(scope="train"):
    first = (turn(0, queue=1.0, generate=2.0, tokens=4), turn(1, queue=0.0, generate=1.0, tokens=8, cached=5))
    second = (turn(0, queue=2.0, generate=4.0, tokens=0, extra={"spec_accept_rate": 0.5}),)
    responses = [
        ResponseTrace(index=1, attempt=0, began=100.0, seconds=7.0, turns=first),
        ResponseTrace(index=2, attempt=1, began=101.0, seconds=6.0, turns=second),
    ]
    return GroupTrace(scope=scope, group_index=3, reward_s=0.25, responses=responses)


def test_metrics_are_of_the_training_groups_since_the_last_call():
    trace = RolloutTrace(None)
    assert trace.metrics() == {}
    trace.add(group())
    trace.add(group("eval-x"))
    metrics = trace.metrics()
    assert metrics["perf/request/queue_time/mean"] == 1.0
    assert metrics["perf/request/generate_time/max"] == 4.0
    assert (metrics["perf/decode/tok_per_s/min"], metrics["perf/decode/tok_per_s/max"]) == (2.0, 8.0)
    # 7 - 1 - 3 s of the first response were neither waiting nor generation.
    assert (metrics["perf/non_generation_time/max"], metrics["perf/non_generation_time/min"]) == (3.0, 0.0)
    assert metrics["perf/reward_time/mean"] == 0.25
    assert metrics["rollout/prefix_cache_hit_rate"] == pytest.approx(5 / 30)
    assert metrics["rollout/avg_cached_tokens_per_sample"] == 2.5
    assert metrics["rollout/spec_accept_rate"] == 0.5
    assert "rollout/spec_accept_length" not in metrics
    assert trace.metrics() == {}


def test_a_line_for_each_sample(tmp_path):
    trace = RolloutTrace(tmp_path / "traces.jsonl")
    trace.add(group())
    trace.close()
    again = RolloutTrace(tmp_path / "traces.jsonl")
    again.add(group("eval-x"))
    again.close()
    lines = [json.loads(line) for line in (tmp_path / "traces.jsonl").read_text().splitlines()]
    assert [(line["scope"], line["sample"], line["attempt"]) for line in lines] == [
        ("train", 1, 0),
        ("train", 2, 1),
        ("eval-x", 1, 0),
        ("eval-x", 2, 1),
    ]
    first = lines[0]
    assert {key: first[key] for key in ("group", "queue_s", "generate_s", "other_s", "reward_s", "seconds")} == {
        "group": 3,
        "queue_s": 1.0,
        "generate_s": 3.0,
        "other_s": 3.0,
        "reward_s": 0.25,
        "seconds": 7.0,
    }
    assert [turn["tokens"] for turn in first["turns"]] == [4, 8]
