"""Runs that are stopped: by Ctrl-C, a failing reward, a full disk, a damaged checkpoint. Nothing that was done is lost,
and the same command continues: every step is in metrics.jsonl exactly once.

Runs that get a signal are started, as users do; those that end by themselves are forks."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Ended, TinyRun

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("tiny_forks")]

ALL = [0, 1, 2, 3, 4]
OPTIONS = ("--plugin", "moody.py", "--reward", "moody")
MOODY = '''
"""What goes wrong is written in the file `plan` beside this one, so that the plugin stays the same when it is fixed."""
import errno, json, multiprocessing, os, pathlib, signal, time
from slime_core.plugin import hook, reward

PLAN = pathlib.Path("{folder}") / "plan"


def due(what, step):
    """Once: the plan is forgotten when it is carried out."""
    try:
        plan = json.loads(PLAN.read_text())
    except FileNotFoundError:
        return False
    if (plan["do"], plan["step"]) != (what, step):
        return False
    if not plan.get("again"):
        PLAN.unlink()
    return True


@reward("moody")
def moody(sample):
    if sample.prompt.origin.startswith("{folder}/held_out.jsonl"):
        if due("ctrl-c while evaluating", 0):
            os.killpg(0, signal.SIGINT)
            time.sleep(60)
        return 0.0
    step = sample.group_index // 2
    if due("raise", step):
        raise ValueError("no response key")
    # By the group that is not waited for first.
    if sample.group_index % 2 and due("ctrl-c while generating", step):
        os.killpg(0, signal.SIGINT)
        time.sleep(300)
    if due("ctrl-c twice", step):
        os.killpg(0, signal.SIGINT)
        time.sleep(1)
        os.killpg(0, signal.SIGINT)
        time.sleep(60)
    if due("terminate", step):
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)
    while due("wait", step):
        time.sleep(0.1)
    if due("fill the disk", step):
        fill_the_disk(0)
    if due("nearly fill the disk", step):
        fill_the_disk(40_000)
    return float(sample.index % 2)


@hook
def batch_ready(event):
    if due("ctrl-c while training", event.rollout_id):
        os.killpg(0, signal.SIGINT)


if multiprocessing.parent_process() is not None and due("fail in the worker", 0):
    raise RuntimeError("no room for the worker")
FILLER = pathlib.Path("{folder}") / "runs/filler"


def fill_the_disk(left):
    with FILLER.open("wb", buffering=0) as file:
        if FAKE:
            return
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            file.truncate(max(0, file.tell() - left))


FAKE = {fake}
if FAKE:
    real_fsync = os.fsync

    def fsync(file):
        if FILLER.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_fsync(file)

    os.fsync = fsync
'''


@pytest.fixture
def moody(tiny: TinyRun) -> TinyRun:
    write_plugin(tiny, fake=False)
    return tiny


def started(tiny: TinyRun, *words: str) -> Ended:
    return tiny.end(tiny.start("run", "run.toml", *words))


def write_plugin(tiny: TinyRun, *, fake: bool) -> None:
    text = MOODY.replace("{folder}", str(tiny.folder)).replace("{fake}", str(fake))
    (tiny / "moody.py").write_text(text)


def plan(tiny: TinyRun, do: str, step: int, *, again: bool = False) -> None:
    (tiny / "plan").write_text(json.dumps({"do": do, "step": step, "again": again}))


def finish(tiny: TinyRun, *words: str) -> None:
    """The same command continues to the end."""
    ended = tiny.run(*OPTIONS, *words)
    assert (ended.code, ended.err) == (0, "")
    assert tiny.steps() == tiny.steps("train/step") == ALL
    assert "step_5" in tiny.checkpoints()
    assert [path.name for path in tiny.runs.iterdir() if path.name != "filler"] == ["tiny"]


@pytest.mark.parametrize(
    ("do", "code", "checkpoint"),
    [
        # Asked in step 2: the groups of that step are given back, or the step is trained to its end.
        ("ctrl-c while generating", 130, 2),
        ("ctrl-c while training", 130, 3),
        ("terminate", 143, 2),
    ],
)
def test_a_signal(moody: TinyRun, do: str, code: int, checkpoint: int) -> None:
    plan(moody, do, 2)
    ended = started(moody, *OPTIONS, "--save-interval", "5", "--reward-timeout", "300")
    assert ended.code == code
    assert "interrupted" in ended.error
    assert f"{checkpoint} of 5 steps are done and saved in {moody.runs}/tiny" in ended.error
    assert "Start the same command again" in ended.error
    assert moody.checkpoints() == [f"step_{checkpoint}"]
    assert moody.steps() == ALL[:checkpoint]
    finish(moody, "--save-interval", "5", "--reward-timeout", "300")


def test_ctrl_c_while_evaluating(moody: TinyRun) -> None:
    shutil.copy(moody / "train.jsonl", moody / "held_out.jsonl")
    options = ["--eval-prompt-data", "held_out", "held_out.jsonl", "--eval-interval", "2", "--skip-eval-before-train"]
    plan(moody, "ctrl-c while evaluating", 0)
    ended = started(moody, *OPTIONS, *options, "--save-interval", "5")
    assert ended.code == 130
    assert "interrupted while evaluating; 2 of 5 steps are done and saved" in ended.error
    assert moody.checkpoints() == ["step_2"]
    finish(moody, *options, "--save-interval", "5")
    assert moody.steps("eval/step") == [2, 4, 5]


def test_a_closed_terminal(moody: TinyRun) -> None:
    """The system sends SIGHUP to the run and its workers, and printing fails with EIO."""
    plan(moody, "wait", 2, again=True)
    terminal, ours = pty.openpty()
    words = ["run", "run.toml", *OPTIONS, "--save-interval", "5", "--reward-timeout", "300"]
    process = subprocess.Popen(
        [sys.executable, "-c", "from slime_core.cli.main import main; main()", *words],
        cwd=moody.folder, stdin=ours, stdout=ours, stderr=ours, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(ours)
    os.set_blocking(terminal, False)
    while moody.steps_so_far() != [0, 1]:
        assert process.poll() is None, "it ended before"
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 65536)
        time.sleep(0.05)
    os.close(terminal)
    assert process.wait(120) == 129
    assert moody.checkpoints() == ["step_2"]
    (moody / "plan").unlink()
    finish(moody, "--save-interval", "5", "--reward-timeout", "300")


def test_a_second_ctrl_c_ends_at_once(moody: TinyRun) -> None:
    plan(moody, "ctrl-c twice", 2)
    process = moody.start("run", "run.toml", *OPTIONS)
    while process.poll() is None:
        time.sleep(0.1)
    # The reward would continue for a minute.
    assert_gone(process)
    ended = moody.end(process)
    assert ended.code == 130
    assert "Traceback" not in ended.err
    assert moody.checkpoints() == ["step_1", "step_2"]


def assert_gone(process: subprocess.Popen[str]) -> None:
    """No process of the group is left: neither workers nor what they started."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.2)
    raise AssertionError("processes are left behind")


def has_torch(process: subprocess.Popen[str]) -> bool:
    return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()


def has_worker(process: subprocess.Popen[str]) -> bool:
    """A reward's worker is importing what it needs."""
    for commands in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(commands.parent.name)) == process.pid and b"spawn_main" in commands.read_bytes():
                time.sleep(0.15)
                return True
    return False


@pytest.mark.parametrize("reached", [has_torch, has_worker], ids=["imports", "start"])
def test_ctrl_c_before_the_first_step(moody: TinyRun, reached: Callable[[subprocess.Popen[str]], bool]) -> None:
    # Also if this process is late.
    plan(moody, "wait", 0, again=True)
    process = moody.start("run", "run.toml", *OPTIONS, "--reward-timeout", "300")
    while not reached(process):
        assert process.poll() is None, "it ended before"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    ended = moody.end(process)
    assert ended.code == 130
    assert "interrupted" in ended.error
    assert_gone(process)


def test_a_reward_that_raises_later_on(moody: TinyRun) -> None:
    plan(moody, "raise", 3)
    ended = moody.run(*OPTIONS, "--save-interval", "5")
    assert ended.code == 4
    assert "train.jsonl, line 7: raised ValueError: no response key" in ended.error
    assert moody.checkpoints() == ["step_3"]
    assert moody.steps() == [0, 1, 2]
    finish(moody, "--save-interval", "5")


def test_a_checkpoint_cut_short(moody: TinyRun) -> None:
    plan(moody, "raise", 3)
    assert moody.run(*OPTIONS).code == 4
    newest = moody.runs / "tiny/checkpoints/step_3"
    (largest, *_) = sorted(newest.rglob("*"), key=lambda path: path.stat().st_size * path.is_file(), reverse=True)
    os.truncate(largest, 100)

    ended = moody.run(*OPTIONS)
    assert ended.code == 7
    for text in (str(newest), "cut short", str(largest.relative_to(newest)), "has 100 of", "--ckpt-step 2"):
        assert text in ended.error

    # A start that fails gives up no checkpoint.
    plan(moody, "fail in the worker", 0)
    ended = moody.run(*OPTIONS, "--ckpt-step", "1")
    assert ended.code != 0
    assert "no room for the worker" in ended.error
    assert moody.checkpoints() == ["step_1", "step_2", "step_3"]

    ended = moody.run(*OPTIONS, "--ckpt-step", "9")
    assert ended.code == 7
    assert "no complete checkpoint of step 9; pass one of 1, 2, 3" in ended.error

    ended = moody.run(*OPTIONS, "--entropy-coef", "0.5", "--resume", "runs/tiny")
    assert ended.code == 2
    assert "--resume runs/tiny: another run: algo.entropy_coef: 0.0 -> 0.5" in ended.error

    # Interrupted again before step 3: the damaged checkpoint must not count as the newest.
    plan(moody, "raise", 2)
    assert moody.run(*OPTIONS, "--ckpt-step", "2").code == 4
    assert moody.checkpoints() == ["step_1", "step_2"]
    finish(moody)


def test_the_same_run_twice_at_once(moody: TinyRun) -> None:
    plan(moody, "wait", 1, again=True)
    first = moody.start("run", "run.toml", *OPTIONS, "--reward-timeout", "300")
    while not (moody.runs / "tiny/checkpoints/step_1/COMPLETE").exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.1)
    second = moody.run(*OPTIONS)
    assert second.code == 2
    assert f"{moody.runs}/tiny: this run is running in another process" in second.error
    assert "--name" in second.error
    (moody / "plan").unlink()
    ended = moody.end(first)
    assert (ended.code, ended.err) == (0, "")
    assert moody.steps() == ALL


@pytest.fixture
def small_disk(moody: TinyRun) -> Iterator[Path]:
    """runs/ on a file system of 2 MiB. Without the permission to mount one, files cannot be synced while `filler` exists."""
    moody.runs.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(moody.runs)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        write_plugin(moody, fake=True)
        yield moody.runs
        return
    try:
        yield moody.runs
    finally:
        subprocess.run(["umount", str(moody.runs)], check=True)


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        while os.path.ismount(path.parent):
            file.write(b"x" * 4096)


def test_no_space_left(moody: TinyRun, small_disk: Path) -> None:
    filler = small_disk / "filler"
    # Enough for metrics.jsonl, too little for a checkpoint.
    plan(moody, "nearly fill the disk", 2)
    ended = moody.run(*OPTIONS)
    assert ended.code == 8
    for text in ("checkpoints/step_3: no space left", "What was saved before is untouched", "free some space"):
        assert text in ended.error
    assert moody.checkpoints() == ["step_1", "step_2"]

    # A disk that is full from the start.
    fill(filler)
    ended = moody.run(*OPTIONS)
    assert ended.code == 8
    assert "no space left" in ended.error

    # A disk that is full when the metrics of step 3 are written.
    filler.unlink()
    plan(moody, "fill the disk", 3)
    ended = moody.run(*OPTIONS)
    assert ended.code == 8
    assert "no space left" in ended.error
    assert moody.checkpoints() == ["step_1", "step_2", "step_3"]

    filler.unlink()
    finish(moody)


def test_no_space_left_while_the_run_continues(moody: TinyRun, small_disk: Path) -> None:
    """The responses that step 2 is trained on are there, and what step 1 left may be written or not."""
    plan(moody, "nearly fill the disk", 2)
    ended = moody.run(*OPTIONS, "--async-save")
    assert ended.code == 8
    assert re.search(r"checkpoints/step_\d: no space left.*What was saved before is untouched", ended.error)
    assert moody.checkpoints() in (["step_1"], ["step_1", "step_2"])
    assert not list((moody.runs / "tiny/checkpoints").glob(".*"))
    (small_disk / "filler").unlink()
    finish(moody, "--async-save")


SLOW_WRITER = '''
"""From the third checkpoint on, a write waits in its middle for the file `go` beside this one."""
import pathlib, time
from slime_core.plugin import reward
from slime_fsdp import checkpoint

FOLDER = pathlib.Path("{folder}")
write_manifest = checkpoint.write_manifest


def slow(folder, snapshot, world_size):
    if snapshot.steps_done >= 3:
        (FOLDER / "in_the_middle").write_text("")
        while not (FOLDER / "go").exists():
            time.sleep(0.01)
    write_manifest(folder, snapshot, world_size)


checkpoint.write_manifest = slow


@reward("parity")
def parity(sample):
    return float(sample.index % 2)
'''


def test_killed_while_a_checkpoint_is_written(tiny: TinyRun) -> None:
    """The next step is done; the run resumes from the checkpoint before, to the bits of one that waits for its writes."""
    (tiny / "slow.py").write_text(SLOW_WRITER.replace("{folder}", str(tiny.folder)))
    options = ("--plugin", "slow.py", "--reward", "parity", "--checkpoint.save-hf")
    (tiny / "go").write_text("")
    assert started(tiny, *options, "--name", "waits").code == 0
    (tiny / "go").unlink()
    (tiny / "in_the_middle").unlink()

    process = tiny.start("run", "run.toml", *options, "--async-save")
    deadline = time.monotonic() + 120
    while not (tiny / "in_the_middle").exists() or tiny.steps_so_far() != [0, 1, 2, 3]:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert tiny.checkpoints() == ["step_1", "step_2"]
    assert (tiny.runs / "tiny/checkpoints/.step_3.writing").is_dir()

    (tiny / "go").write_text("")
    ended = tiny.run(*options, "--async-save")
    assert (ended.code, ended.err) == (0, "")
    assert tiny.steps() == ALL
    assert tiny.checkpoints() == ["step_3", "step_4", "step_5"]
    assert not list((tiny.runs / "tiny/checkpoints").glob(".*"))
    for name in ("hf/model.safetensors", "checkpoints/step_5/trainer/actor/fsdp.json"):
        assert (tiny.runs / "tiny" / name).read_bytes() == (tiny.runs / "waits" / name).read_bytes()


FIRST_STEPS_ONLY = '''
"""Nothing passes once six groups have been judged: what a filter sees when everything is learnt."""
from slime_core.contracts.filter import FilterDecision, FilterDriver, GroupFilter
from slime_core.plugin import driver


class FirstSteps(GroupFilter):
    def decide(self, group):
        return FilterDecision(keep=group.samples[0].group_index < 6, reason="learnt")


@driver("slime.filters", "first_steps")
class FirstStepsFilter(FilterDriver):
    @classmethod
    def build(cls, config):
        return FirstSteps()
'''


@pytest.mark.parametrize("ahead", [0, 1])
def test_rollouts_that_are_exhausted_fail_the_run_or_finish_it(tiny: TinyRun, ahead: int) -> None:
    (tiny / "first_steps.py").write_text(FIRST_STEPS_ONLY)
    words = ["--plugin", "first_steps.py", "--filters", "first_steps", "--eval-prompt-data", "held", "train.jsonl"]
    words += ["--rollout.max_async_level", str(ahead), "--save-interval", "2"]
    ended = tiny.run(*words)
    assert ended.code == 4
    assert re.search(
        r"20 groups were rejected while 0 of 2 were accepted \(learnt 20\).*--on-exhausted finish", ended.error
    )
    assert tiny.steps() == [0, 1, 2]
    assert tiny.checkpoints()[-1] == "step_3"
    ended = tiny.run(*words, "--fresh", "--name", "finished", "--on-exhausted", "finish")
    assert ended.code == 0, ended.err
    assert "ended after 3 steps: step 3: 20 groups were rejected" in ended.out
    assert tiny.steps(run="finished") == [0, 1, 2]
    assert tiny.checkpoints("finished")[-1] == "step_3"
    # This step gets the actions of a last step: its weights are evaluated and exported.
    assert tiny.steps("eval/step", "finished") == [0, 3]
    summary = json.loads((tiny.runs / "finished" / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["ended_early"].startswith("step 3: 20 groups")
