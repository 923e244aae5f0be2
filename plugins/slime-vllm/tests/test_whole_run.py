"""`slime run --engine vllm` with two real servers of vLLM: three steps of several turns, by the flags that a user types."""

import pytest
from carried_run import events_of, metrics_of, slime, write_run

pytestmark = pytest.mark.vllm

TURNS = '''
"""Four turns. What a tool returns after each is another text for every sample."""
from dataclasses import replace
import numpy as np
from slime_core.plugin import generator


@generator("turns")
async def turns(episode):
    trajectory = episode.trajectory()
    for turn in range(4):
        if turn:
            drawn = np.random.default_rng([episode.prompt.group_index, trajectory.index, turn])
            trajectory.append_environment(drawn.integers(4, 20, 300, np.int32))
        exact = replace(episode.sampling, max_new_tokens=4, min_new_tokens=4)
        trajectory.append_completion(await episode.complete(trajectory.tokens, exact))
    return [trajectory.finish()]
'''
CACHED = 256 + 512
"""Tokens of a sample whose turns are all on one server: whole blocks of 128 tokens of the turn before. Before the second turn
there is none, before the third 310 tokens, before the last 610. Nothing else is cached: texts differ, new weights drop it."""


def test_the_samples_of_a_run_stay_on_the_server_that_has_their_prefix(served, model, tmp_path):
    write_run(tmp_path, model)
    (tmp_path / "turns.py").write_text(TURNS)
    words = ["--engine", "vllm", "--vllm-servers", "2", "--vllm-external-engine-addrs", ",".join(served.addresses)]
    words += [
        "--vllm-external-engine-token-file",
        str(served.token_file),
        "--plugin",
        "turns.py",
        "--generate",
        "turns",
    ]
    words += ["--rollout-max-response-len", "1000", "--transport", "ipc", "--check-weight-update-equal"]
    for address in served.addresses:
        served.ask("/update_weight_version", {"new_version": "default"}, address=address)
    before = [served.counted("prefix_cache_hits", address) for address in served.addresses]
    run = slime(tmp_path, *words)
    after = [served.counted("prefix_cache_hits", address) for address in served.addresses]
    rollouts = metrics_of(run, "rollout/step")
    assert [row["rollout/staleness/max"] for row in rollouts] == [0, 0, 0]
    steps = metrics_of(run, "train/step")
    assert len(steps) == 3
    assert all(step["train/train_rollout_logprob_abs_diff"] < 1e-5 for step in steps)
    assert [served.ask("/weight_info", address=address)[1] for address in served.addresses] == [
        {"weight_version": "3"}
    ] * 2
    assert [event["compared_with"] for event in events_of(run, "weights_compared")] == ["trainer"] * 4
    assert not events_of(run, "engine_lost")
    # By the servers' own counts: each has the prefixes of the samples that it began, and both began some.
    hits = [now - then for now, then in zip(after, before, strict=True)]
    assert [count % CACHED for count in hits] == [0, 0]
    assert sum(hits) == 3 * 8 * CACHED
    assert min(hits) > 0
    assert [row["rollout/avg_cached_tokens_per_sample"] for row in rollouts] == [CACHED] * 3
