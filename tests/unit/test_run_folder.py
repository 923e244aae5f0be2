"""The folder of a start, the differences between two starts, and the fingerprint of a run."""

import errno
import json
import multiprocessing
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from slime_core.controller.folder_lock import lock_folder
from slime_core.controller.manifest import (
    Manifest,
    build_manifest,
    check_required,
    differences,
    fingerprint_of,
    replay_identity,
    without,
)
from slime_core.controller.run_changes import ChangeKind
from slime_core.controller.run_folder import RunFolder
from slime_core.controller.start_folder import StartOptions, choose_start, clear_folder
from slime_core.controller.startup import with_accepted
from slime_core.errors import ConfigError, PluginError, StorageError


def manifest(lr=1, *, plugins=("0.2.0",), data="d", **config):
    """Of a run with this learning rate and these versions of acme-a, acme-b, ..."""
    config = {"name": "run", "train": {"lr": lr, "num_rollout": 5}} | config
    named = {f"algo loss{i}": f"slime.losses:acme-{'ab'[i]}/loss{i} {version}" for i, version in enumerate(plugins)}
    content = {"config": config, "plugins": named, "plugin_files": {}, "data": data}
    return Manifest(
        slime_core="0.1.0",
        python="3.11",
        libraries={"torch": "2"},
        trust_remote_code=False,
        fingerprint=fingerprint_of(**content),
        **content,
    )


def begun(path, made, *, finished=False, saved=0, **more):
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(json.dumps(json.loads(made.to_json()) | more))
    if finished:
        (path / "summary.json").write_text(json.dumps({"steps": 5}))
    if saved:
        (path / f"checkpoints/step_{saved}").mkdir(parents=True)
        (path / f"checkpoints/step_{saved}/COMPLETE").write_text("{}")
    return path


def place(runs, made, **options):
    made = replace(made, config={"runs_dir": str(runs), **made.config})
    return choose_start(made, StartOptions(**options))


def choose(runs, made, **options):
    return place(runs, made, **options).folder.path.name


def test_the_first_start_takes_the_name(tmp_path):
    assert choose(tmp_path, manifest()) == "run"
    assert not list(tmp_path.iterdir())


def test_an_unfinished_run_of_the_same_fingerprint_continues(tmp_path):
    begun(tmp_path / "run", manifest())
    assert choose(tmp_path, manifest()) == "run"


@pytest.mark.parametrize("finished", [False, True])
def test_a_run_of_other_keys_is_left_alone_and_named(tmp_path, finished):
    begun(tmp_path / "run", manifest(2), finished=finished, saved=3)
    there = place(tmp_path, manifest(1))
    assert there.folder.path.name == "run-2"
    state = "is finished" if finished else "has 3 steps saved"
    assert there.notes == [
        f"{tmp_path}/run {state}, and began with others: train.lr: 2 -> 1. This one starts in {tmp_path}/run-2"
    ]
    begun(tmp_path / "run-2", manifest(3))
    assert choose(tmp_path, manifest(1)) == "run-3"
    begun(tmp_path / "run-3", manifest(1))
    assert choose(tmp_path, manifest(1)) == "run-3"


def test_a_finished_run_is_not_trained_again_unasked(tmp_path):
    begun(tmp_path / "run", manifest(), finished=True)
    with pytest.raises(ConfigError) as caught:
        choose(tmp_path, manifest())
    assert str(caught.value) == (
        f"{tmp_path}/run: this run is finished, with 5 steps. To train it longer, add for example --num-rollout 6 --resume "
        f"{tmp_path}/run. To train again from the start, pass another --name, or --fresh, which removes this run."
    )
    longer = manifest(train={"lr": 1, "num_rollout": 50})
    with pytest.raises(ConfigError, match=r"--num-rollout 50 --resume"):
        choose(tmp_path, longer)
    assert choose(tmp_path, longer, resume=tmp_path / "run") == "run"
    assert choose(tmp_path, manifest(), fresh=True) == "run"
    # An unfinished one continues.
    begun(tmp_path / "run-2", manifest())
    assert choose(tmp_path, manifest()) == "run-2"


OLD, NEW = manifest(plugins=("0.2.0", "0.2.0")), manifest(plugins=("0.2.1", "0.2.1"))
ACCEPT = frozenset({ChangeKind.PLUGINS})


@pytest.mark.parametrize("options", [{}, {"resume": "run"}])
def test_a_plugin_of_another_version_is_named_and_can_be_accepted(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    begun(tmp_path / "run", OLD, saved=3)
    options = {name: Path(path) for name, path in options.items()}
    runs = Path()
    with pytest.raises(ConfigError) as caught:
        choose(runs, NEW, **options)
    assert str(caught.value) == (
        "run: this run is unfinished, 3 steps are saved, and it began with others: acme-a, acme-b: 0.2.0 -> 0.2.1. To "
        "continue it with what there is now, add --accept-changes plugins. To continue it as it was, put the old ones back. "
        "To train from the start, pass another --name, or --fresh, which removes this run."
    )
    there = place(runs, NEW, accept=ACCEPT, **options)
    assert there.folder.path.name == "run"
    assert [str(change) for change in there.accepted] == ["acme-a, acme-b: 0.2.0 -> 0.2.1"]


def test_what_was_accepted_is_recorded_and_holds_until_the_next_change(tmp_path):
    begun(tmp_path / "run", OLD, saved=3)
    accepted = with_accepted(NEW, place(tmp_path, NEW, accept=ACCEPT), 3)
    (tmp_path / "run/manifest.json").write_text(accepted.to_json())
    (record,) = accepted.accepted_changes
    assert record.keys() == {"time", "user", "host", "rollout_id", "changes"}
    assert record["rollout_id"] == 3
    assert record["changes"] == [{"kind": "plugins", "what": "acme-a, acme-b", "old": "0.2.0", "new": "0.2.1"}]
    there = place(tmp_path, NEW)
    assert (there.folder.path.name, there.accepted) == ("run", [])
    assert [dict(one) for one in with_accepted(NEW, there, 4).accepted_changes] == [record]
    with pytest.raises(ConfigError, match=r"acme-a, acme-b: 0\.2\.1 -> 0\.2\.0"):
        place(tmp_path, OLD)


def test_an_option_that_the_other_version_added_or_changed_is_part_of_the_change(tmp_path):
    begun(tmp_path / "run", manifest(plugins=("0.2.0",), algo={"name": "x", "clip": 0.2}), saved=3)
    new = manifest(plugins=("0.2.1",), algo={"name": "x", "clip": 0.3, "more": 1})
    with pytest.raises(ConfigError, match=r"acme-a: .*; algo\.clip: 0\.2 -> 0\.3; algo\.more: None -> 1\. To continue"):
        place(tmp_path, new)
    assert choose(tmp_path, new, accept=ACCEPT) == "run"
    # Another algorithm, and another key of a table whose plugin is the same, are other runs.
    for other in (
        manifest(plugins=("0.2.1",), algo={"name": "y"}),
        manifest(plugins=("0.2.0",), algo={"name": "x", "clip": 0.3}),
    ):
        assert choose(tmp_path, other) == "run-2"


def test_other_data_stop_an_unfinished_run(tmp_path):
    begun(tmp_path / "run", manifest(data="a" * 32), saved=3)
    for options in ({}, {"resume": tmp_path / "run"}, {"accept": ACCEPT}):
        with pytest.raises(ConfigError) as caught:
            place(tmp_path, manifest(data="b" * 32), **options)
        assert "checksum of the training data: aaaaaaaaaaaa -> bbbbbbbbbbbb" in str(caught.value)
        assert "put them back. To train from the start, pass another --name" in str(caught.value)


def test_a_run_of_which_nothing_is_saved_is_left_alone(tmp_path):
    begun(tmp_path / "run", OLD)
    assert choose(tmp_path, NEW) == "run-2"
    with pytest.raises(ConfigError, match=r"--accept-changes: no unfinished run is in"):
        place(tmp_path, NEW, accept=ACCEPT)


def test_other_libraries_are_named(tmp_path):
    begun(tmp_path / "run", manifest(), libraries={"torch": "1"})
    assert place(tmp_path, manifest()).notes == [f"{tmp_path}/run continues with other versions: torch: '1' -> '2'"]


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
    begun(tmp_path / "there", manifest(), finished=True)
    assert choose(tmp_path, manifest(), resume=tmp_path / "there") == "there"
    with pytest.raises(ConfigError, match=r"no run there"):
        choose(tmp_path, manifest(), resume=tmp_path / "nowhere")


def test_resume_of_another_run_lists_the_differences(tmp_path):
    begun(tmp_path / "there", manifest(1, name="a", backend={"tensor_parallel": 1}))
    other = manifest(3, name="b", backend={"tensor_parallel": 2})
    with pytest.raises(ConfigError, match=r"another run: backend.*; name: 'a' -> 'b'; train\.lr: 1 -> 3\."):
        choose(tmp_path, other, resume=tmp_path / "there")


def test_resume_may_change_the_layout_and_a_start_by_itself_may_not(tmp_path):
    begun(tmp_path / "run", manifest(backend={"tensor_parallel": 1}), saved=3)
    other = replace(manifest(backend={"tensor_parallel": 2}), may_differ=(("name",), ("backend", "tensor_parallel")))
    assert choose(tmp_path, other, resume=tmp_path / "run") == "run"
    with pytest.raises(
        ConfigError, match=r"tensor_parallel: 1 -> 2\. To continue it .*, add --resume /.*/run\. To train"
    ):
        choose(tmp_path, other)


def test_a_key_that_resume_may_change_makes_another_run_of_a_start_by_itself(tmp_path):
    begun(tmp_path / "run", manifest(1), saved=3)
    other = replace(manifest(2), may_differ=(("train", "lr"),))
    assert choose(tmp_path, other, resume=tmp_path / "run") == "run"
    assert choose(tmp_path, other) == "run-2"


def test_fresh_empties_the_folder(tmp_path):
    folder = begun(tmp_path / "run", manifest(2), finished=True)
    assert choose(tmp_path, manifest(1), fresh=True) == "run"
    assert folder.exists(), "choosing changes nothing"
    clear_folder(RunFolder(folder))
    assert not folder.exists()
    clear_folder(RunFolder(folder))


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
    yield process.pid
    done.set()
    process.join()


def test_two_processes_cannot_work_in_one_folder(tmp_path, other_process):
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            lock_folder(RunFolder(tmp_path / "run"))
        message = str(caught.value)
        assert message.startswith(
            f"{tmp_path}/run: this run is running in another process. Wait for it, or give this one a"
        )
        assert f"The other process: pid {other_process} on {socket.gethostname()}, since 20" in message


def test_a_lock_that_a_process_left_behind_holds(tmp_path, other_process):
    """Its content names the process that took it, which has ended; a process that it had forked still holds it."""
    ended = multiprocessing.get_context("fork").Process(target=int)
    ended.start()
    ended.join()
    lock_file = tmp_path / "run/.lock"
    lock_file.write_text(json.dumps(json.loads(lock_file.read_text()) | {"pid": ended.pid}))
    with pytest.raises(
        ConfigError, match=rf"pid {ended.pid} on .* has ended, and left one behind.*`fuser {lock_file}`"
    ):
        lock_folder(RunFolder(tmp_path / "run"))


def test_a_dead_lock_is_taken_over(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.lock").write_text('{"host": "gone", "pid": 1, "since": "2020"}')
    with lock_folder(RunFolder(tmp_path / "run")):
        assert json.loads((tmp_path / "run/.lock").read_text())["pid"] == os.getpid()


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(StorageError, match=r"cannot be written or locked: .*No locks available.*--runs-dir"):
        lock_folder(RunFolder(tmp_path / "run"))


def test_fresh_does_not_pull_a_folder_from_under_another_process(tmp_path, other_process):
    (tmp_path / "run" / "manifest.json").write_text(manifest(2).to_json())
    with pytest.raises(ConfigError, match="running in another process"):
        clear_folder(RunFolder(tmp_path / "run"))
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
    def identity_of(*flags, data="d"):
        return replay_identity(build_manifest(bound(*flags), data_fingerprint=data))

    recorded = identity_of()
    assert recorded == json.loads(json.dumps(recorded))
    free = (
        "--name", "another", "--runs-dir", "elsewhere", "--trackers", "tensorboard", "--dump-rollouts",
        "--keep-checkpoints", "5", "--no-save-hf", "--print-completions-interval", "3", "--reward-timeout", "99",
        "--reward-workers", "2",
    )  # fmt: skip
    assert identity_of(*free) == recorded
    deciding = [
        (("--num-rollout", "7"), "train.num_rollout"),
        (("--save-interval", "2"), "checkpoint.save_interval"),
        (("--eval-interval", "3"), "eval.eval_interval"),
        (("--lr", "0.5"), "train.lr"),
        (("--reward", "two"), "plugins."),
    ]
    for flags, key in deciding:
        assert any(line.startswith(key) for line in differences(recorded, identity_of(*flags))), key
    assert differences(recorded, identity_of(data="e")) == ["training_data: 'd' -> 'e'"]


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
