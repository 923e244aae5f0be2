"""A run whose requests pass through middlewares, and a replay of the same run from their record."""

import json

MIDDLEWARES = """
[router]
middlewares = [
    "retry",
    { name = "priority", concurrency = 3, levels = { train = 1 } },
    "session_affinity",
    { name = "record", path = "responses.jsonl", mode = "%s" },
]
"""


def learnt(tiny, run):
    """Every metric but times."""
    return [
        {name: value for name, value in record["metrics"].items() if not name.startswith("perf/")}
        for record in tiny.metrics(run)
    ]


def test_a_run_repeats_from_its_recorded_responses(tiny, warm_pair):
    """In a process with another hash seed."""
    first, second = warm_pair
    tiny.warm = first
    run_file = (tiny / "run.toml").read_text()
    words = ("--num-rollout", "2")
    (tiny / "run.toml").write_text(run_file + MIDDLEWARES % "record")
    assert tiny.run(*words).code == 0
    lines = (tiny / "responses.jsonl").read_text().splitlines()
    assert len(lines) == 8
    assert {json.loads(line)["request"]["request_id"] for line in lines} == {f"train/{index}/0" for index in range(8)}

    (tiny / "run.toml").write_text(run_file + MIDDLEWARES % "replay")
    tiny.warm = second
    assert tiny.run(*words, "--name", "again").code == 0
    assert learnt(tiny, "again") == learnt(tiny, "tiny") != []
