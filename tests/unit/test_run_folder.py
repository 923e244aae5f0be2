"""The folder of a start, the differences between two starts, and the fingerprint of a run."""

import json
import multiprocessing
from dataclasses import replace

import pytest

from slime_core.controller.manifest import (
    Manifest,
    build_manifest,
    check_required,
    differences,
    replay_identity,
    training_of,
    without,
)
from slime_core.controller.run_folder import RunFolder, choose_folder, lock_folder
from slime_core.errors import ConfigError, PluginError, StorageError


def manifest(fingerprint="aa", training=None, **config):
    return Manifest(
        slime_core="0.1.0",
        python="3.11",
        libraries={},
        plugins={},
        plugin_files={},
        trust_remote_code=False,
        data="d",
        config=config,
        fingerprint=fingerprint,
        training=training or fingerprint,
    )


def begun(path, made, *, finished=False):
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(made.to_json())
    if finished:
        (path / "summary.json").write_text("{}")
    return path


def choose(runs, made, *, fresh=False, resume=None):
    return choose_folder(runs, made, "run", fresh=fresh, resume=resume).path.name


def test_the_first_start_takes_the_name(tmp_path):
    assert choose(tmp_path, manifest()) == "run"


def test_an_unfinished_run_of_the_same_fingerprint_continues(tmp_path):
    begun(tmp_path / "run", manifest("aa"))
    assert choose(tmp_path, manifest("aa")) == "run"


@pytest.mark.parametrize(("there", "finished"), [("aa", True), ("bb", False), ("bb", True)])
def test_a_finished_or_different_run_is_left_alone(tmp_path, there, finished):
    begun(tmp_path / "run", manifest(there), finished=finished)
    assert choose(tmp_path, manifest("aa")) == "run-2"
    begun(tmp_path / "run-2", manifest("cc"))
    assert choose(tmp_path, manifest("aa")) == "run-3"
    begun(tmp_path / "run-3", manifest("aa"))
    assert choose(tmp_path, manifest("aa")) == "run-3"


def test_a_start_that_was_killed_while_it_wrote_its_manifest_left_nothing(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text('{"finger')
    assert choose(tmp_path, manifest()) == "run"
    # But a folder with checkpoints is a run, even if its manifest is damaged.
    (tmp_path / "run" / "checkpoints").mkdir()
    assert choose(tmp_path, manifest()) == "run-2"


def test_a_summary_alone_is_a_finished_run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text("{}")
    assert choose(tmp_path, manifest()) == "run-2"


def test_resume_continues_in_the_folder_that_is_named(tmp_path):
    begun(tmp_path / "there", manifest("aa"), finished=True)
    assert choose(tmp_path, manifest("aa"), resume=tmp_path / "there") == "there"
    with pytest.raises(ConfigError, match=r"no run there"):
        choose(tmp_path, manifest("aa"), resume=tmp_path / "nowhere")


def test_resume_of_another_run_lists_the_differences(tmp_path):
    begun(tmp_path / "there", manifest("aa", train={"lr": 1, "seed": 2}, name="a", backend={"tensor_parallel": 1}))
    other = {"train": {"lr": 3, "seed": 2}, "name": "b", "backend": {"tensor_parallel": 2}}
    with pytest.raises(ConfigError, match=r"another run: backend.*; name.*; train\.lr: 1 -> 3\."):
        choose(tmp_path, manifest("bb", **other), resume=tmp_path / "there")
    # Not what it could have had otherwise.
    made = replace(manifest("bb", **other), may_differ=(("name",), ("backend", "tensor_parallel")))
    with pytest.raises(ConfigError, match=r"another run: train\.lr: 1 -> 3\.$"):
        choose(tmp_path, made, resume=tmp_path / "there")
    with pytest.raises(ConfigError, match=r"another run: data or plugins differ"):
        choose(
            tmp_path,
            manifest("bb", **RunFolder(tmp_path / "there").read_manifest()["config"]),
            resume=tmp_path / "there",
        )


def test_resume_may_change_the_layout_and_a_start_by_itself_may_not(tmp_path):
    # Whatever might differ for the version that began the run.
    begun(tmp_path / "run", manifest("aa", training="then", backend={"tensor_parallel": 1}))
    may_differ = (("backend", "tensor_parallel"),)
    today = replace(manifest("bb", backend={"tensor_parallel": 2}), may_differ=may_differ)
    today = replace(today, training=training_of(json.loads(today.to_json()), may_differ))
    assert choose(tmp_path, today, resume=tmp_path / "run") == "run"
    assert choose(tmp_path, today) == "run-2"


def test_fresh_empties_the_folder(tmp_path):
    begun(tmp_path / "run", manifest("bb"), finished=True)
    assert choose(tmp_path, manifest("aa"), fresh=True) == "run"
    assert not (tmp_path / "run").exists()
    assert choose(tmp_path, manifest("aa"), fresh=True) == "run"


def hold(path, held, done):
    with lock_folder(RunFolder(path)):
        held.set()
        done.wait(20)


@pytest.fixture
def other_process(tmp_path):
    """Runs in tmp_path/run meanwhile."""
    context = multiprocessing.get_context("fork")
    held, done = context.Event(), context.Event()
    process = context.Process(target=hold, args=(tmp_path / "run", held, done))
    process.start()
    assert held.wait(20)
    yield
    done.set()
    process.join()


def test_two_processes_cannot_work_in_one_folder(tmp_path, other_process):
    with pytest.raises(ConfigError, match="running in another process"):
        lock_folder(RunFolder(tmp_path / "run"))


def test_fresh_does_not_pull_a_folder_from_under_another_process(tmp_path, other_process):
    (tmp_path / "run" / "manifest.json").write_text(manifest("bb").to_json())
    with pytest.raises(ConfigError, match="running in another process"):
        choose(tmp_path, manifest("aa"), fresh=True)
    assert (tmp_path / "run" / "manifest.json").exists()


def test_the_lock_ends_with_the_file(tmp_path):
    lock_folder(RunFolder(tmp_path / "run")).close()
    lock_folder(RunFolder(tmp_path / "run")).close()


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="--runs-dir"):
        lock_folder(RunFolder(tmp_path / "file" / "run"))


# --- The manifest -----------------------------------------------------------------------------------------------------


def test_differences():
    old = {"a": 1, "b": {"c": [1], "d": 2}, "gone": None}
    new = {"a": 1, "b": {"c": [2], "d": 2}, "e": "x"}
    assert differences(old, new) == ["b.c: [1] -> [2]", "e: None -> 'x'"]


def test_without_leaves_the_original_alone():
    config = {"a": {"b": 1, "c": 2}, "d": 3}
    assert without(config, (("a", "b"), ("d",), ("x", "y"))) == {"a": {"c": 2}}
    assert config == {"a": {"b": 1, "c": 2}, "d": 3}


def print_of(run, data="d"):
    return build_manifest(run, data_fingerprint=data).fingerprint


@pytest.mark.parametrize(
    "flags",
    [
        ("--num-rollout", "99"),
        ("--runs-dir", "elsewhere"),
        ("--trackers", "tensorboard"),
        ("--save-interval", "2"),
        ("--eval-prompt-data", "x", "x.jsonl"),
        ("--dump-rollouts",),
        ("--reward-workers", "2"),
    ],
)
def test_settings_that_do_not_change_the_training_keep_the_fingerprint(bound, flags):
    assert print_of(bound(*flags)) == print_of(bound())


@pytest.mark.parametrize(
    "flags",
    [
        ("--lr", "1"),
        ("--seed", "2"),
        ("--eps-clip", "0.1"),
        ("--reward", "two"),
        ("--rollout-temperature", "0.5"),
        ("--kl-loss-coef", "0.1"),
        ("--name", "other"),
        ("--fake-mem-fraction-static", "0.1"),
        ("--algo", "gspo"),
    ],
)
def test_settings_that_change_the_training_change_the_fingerprint(bound, flags):
    assert print_of(bound(*flags)) != print_of(bound())


def test_a_replay_may_change_logging_and_nothing_else(bound, tmp_path):
    def identity(*flags, data="d"):
        return replay_identity(build_manifest(bound(*flags), data_fingerprint=data))

    recorded = identity()
    assert recorded == json.loads(json.dumps(recorded))
    free = (
        "--name", "another", "--runs-dir", "elsewhere", "--trackers", "tensorboard", "--dump-rollouts",
        "--keep-checkpoints", "5", "--no-save-hf", "--print-completions-interval", "3", "--reward-timeout", "99",
        "--reward-workers", "2",
    )  # fmt: skip
    assert identity(*free) == recorded
    deciding = [
        (("--num-rollout", "7"), "train.num_rollout"),
        (("--save-interval", "2"), "checkpoint.save_interval"),
        (("--eval-interval", "3"), "eval.eval_interval"),
        (("--lr", "0.5"), "train.lr"),
        (("--reward", "two"), "plugins."),
    ]
    for flags, key in deciding:
        assert any(line.startswith(key) for line in differences(recorded, identity(*flags))), key
    assert differences(recorded, identity(data="e")) == ["training_data: 'd' -> 'e'"]


def test_other_data_and_other_plugin_files_make_another_run(bound, tmp_path):
    before = print_of(bound())
    assert print_of(bound(), data="other") != before
    with (tmp_path / "reward.py").open("w") as file:
        file.write("from slime_core.plugin import reward\n@reward('three')\ndef three(sample):\n    return 3.0\n")
    plugins = ("--plugin", str(tmp_path / "fakes.py"), str(tmp_path / "reward.py"))
    with_three = print_of(bound(*plugins, "--reward", "three"))
    (tmp_path / "reward.py").write_text((tmp_path / "reward.py").read_text().replace("3.0", "4.0"))
    assert print_of(bound(*plugins, "--reward", "three")) != with_three


def test_the_manifest_is_json_with_the_origin_of_everything(bound):
    made = json.loads(build_manifest(bound("--algo", "cispo"), data_fingerprint="d").to_json())
    assert made["plugins"]["reward one"].startswith("slime.rewards:fakes.py/one ")
    values = " ".join(made["plugins"].values())
    assert "slime.losses:slime-grpo/cispo 0.2.0" in values
    assert "slime.advantages:slime-grpo/group_norm" in values
    assert made["plugin_files"]["fakes.py"]


def test_required_plugins():
    check_required(("slime-rl>=0.2",))
    with pytest.raises(PluginError) as caught:
        check_required(("slime-rl>=99", "acme-not-there>=1", "what is this"))
    lines = str(caught.value).splitlines()
    assert 'pip install "slime-rl>=99"' in lines[0]
    assert "acme-not-there is not installed" in lines[1]
    assert "is not a requirement" in lines[2]
