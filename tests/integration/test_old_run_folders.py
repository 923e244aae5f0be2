"""Unfinished runs of slime 0.1 resume with the current version: the same command finds their folders, and they end as the
uninterrupted runs of 0.1 did. tests/data/runs-0.1/make.py made the folders."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet
import pytest
from safetensors.numpy import load_file

if TYPE_CHECKING:
    from slime_plugin_kit.warm_slime import WarmSlime

RUNS = Path(__file__).parents[1] / "data/runs-0.1"
WAS_AT = "/srv/runs-0.1"
STEPS = 4
TOLERANCE = 1e-5
"""Relative. The runs were made on one CPU, and the bits of sums depend on its instructions."""
OF_A_PROCESS = ("perf/", "rollout/avg_cached_tokens_per_sample", "rollout/prefix_cache_hit_rate")
"""Metrics of times, and of what the process's engine had cached before it was killed."""

# Which keys 0.1 left out of a run's fingerprint.
MAY_CHANGE_0_1 = [
    ["runs_dir"], ["prepare"], ["trackers"], ["checkpoint"], ["debug"], ["train", "num_rollout"], ["train", "num_epoch"],
    ["data", "on_bad_row"], ["eval"], ["rollout", "dump_rollouts"], ["rollout", "reward_workers"],
    ["rollout", "reward_timeout"], ["rollout", "reward_retries"],
]  # fmt: skip


def hash_0_1(manifest: Mapping[str, Any], left_out: list[list[str]]) -> str:
    """The fingerprint that 0.1 wrote into a manifest with this config, these plugins and this data."""
    config = json.loads(json.dumps(manifest["config"]))
    for *tables, key in left_out:
        table = config
        for name in tables:
            table = table.get(name, {})
        table.pop(key, None)
    plugins = {text for where, text in manifest["plugins"].items() if not where.startswith(("trackers", "eval"))}
    identity = {
        "config": config,
        "plugins": sorted(plugins),
        "plugin_files": manifest["plugin_files"],
        "data": manifest["data"],
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def rewrite(path: Path, before: str, after: str) -> None:
    path.write_text(path.read_text().replace(before, after))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A copy of the folders, as if 0.1 had made them there: a fingerprint contains where the model and the data are."""
    copy = Path(shutil.copytree(RUNS, tmp_path / "runs"))
    for folder in (copy / "unfinished").iterdir():
        for name in ("config.toml", "manifest.json", "schedule.jsonl"):
            if (folder / name).exists():
                rewrite(folder / name, WAS_AT, str(copy))
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["fingerprint"] = hash_0_1(manifest, MAY_CHANGE_0_1)
        manifest["training"] = hash_0_1(manifest, manifest["may_differ"])
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True))
    return copy


@pytest.mark.parametrize("name", ["sync", "ahead", "pool"])
def test_the_rule_by_which_copies_are_made_is_that_of_0_1(name: str) -> None:
    manifest = json.loads((RUNS / f"unfinished/{name}/manifest.json").read_text())
    assert manifest["slime_core"] == "0.1.0"
    assert hash_0_1(manifest, MAY_CHANGE_0_1) == manifest["fingerprint"]
    assert hash_0_1(manifest, manifest["may_differ"]) == manifest["training"]


def resume(warm: WarmSlime, runs: Path, name: str) -> Path:
    """Repeats the command that started the run; returns the run's folder."""
    code, out, err = warm.run(["run", f"{name}.toml"], runs)
    assert code == 0, err
    folder = runs / "unfinished" / name
    assert f"{name} in {folder} (attempt 2, from step 2)" in out
    assert not (runs / f"unfinished/{name}-2").exists(), "a new run was begun"
    assert json.loads((folder / "summary.json").read_text())["steps"] == STEPS
    return folder


def figures(path: Path) -> dict[tuple[str, int, str], float]:
    """By axis, step and name."""
    return {
        (line["axis"], line["step"], name): value
        for line in map(json.loads, path.read_text().splitlines())
        for name, value in line["metrics"].items()
        if not name.startswith(OF_A_PROCESS)
    }


@pytest.mark.parametrize("name", ["sync", "ahead"])
def test_a_run_of_0_1_ends_as_if_it_had_not_been_killed(warm: WarmSlime, runs: Path, name: str) -> None:
    folder = resume(warm, runs, name)
    expected = figures(runs / f"ends/{name}/metrics.jsonl")
    logged = figures(folder / "metrics.jsonl")
    assert {key for key in expected if key not in logged} == set(), "these metrics are gone"
    assert {key: logged[key] for key in expected} == pytest.approx(expected, rel=TOLERANCE, abs=1e-7)
    weights, then = (load_file(path / "model.safetensors") for path in (folder / "hf", runs / "ends" / name))
    assert weights.keys() == then.keys()
    for tensor, values in then.items():
        np.testing.assert_allclose(weights[tensor], values, rtol=TOLERANCE, atol=1e-6, err_msg=tensor)
    begun = load_file(runs / "base/model.safetensors")
    assert any(np.abs(values - begun[tensor]).max() > 1e-3 for tensor, values in then.items()), "nothing was learnt"


def test_an_asynchronous_run_of_0_1_loses_no_prompt(warm: WarmSlime, runs: Path) -> None:
    """What it trains depends on time. Groups that its checkpoint has, whole or broken off, are trained or wait, as are those
    drawn since; none twice."""
    checkpoint = runs / "unfinished/pool/checkpoints/step_2"
    waited = groups_in(checkpoint / "buffer/buffer.parquet")
    assert len(waited) == 12
    folder = resume(warm, runs, "pool")
    trained: Counter[int] = Counter()
    for step in range(STEPS):
        found = groups_in(folder / f"rollouts/step_{step:06d}.parquet")
        assert len(found) == 4
        trained.update(found)
    assert set(trained.values()) == {1}, "a group is trained twice"
    end = folder / f"checkpoints/step_{STEPS}/buffer"
    drawn = json.loads((end / "buffer.json").read_text())["source"]["next_group_index"]
    assert set(trained) | groups_in(end / "buffer.parquet") == set(range(drawn)), "a prompt is lost"
    assert len(waited & set(trained)) >= 4, "what waited is not trained first"


def groups_in(path: Path) -> set[int]:
    return set(pyarrow.parquet.read_table(path, columns=["group_index"])["group_index"].to_pylist())


def test_other_settings_are_refused_with_the_differences(warm: WarmSlime, runs: Path) -> None:
    code, _, err = warm.run(["run", "sync.toml", "--resume", "unfinished/sync", "--entropy-coef", "0.5"], runs)
    assert code == 2
    assert "--resume unfinished/sync: another run: algo.entropy_coef: 0.0 -> 0.5." in err
