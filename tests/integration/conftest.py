"""Whole runs of the `slime` command on a tiny model, and third-party distributions, installed in folders of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slime_plugin_kit.warm_slime import WarmSlime

SLIME = [sys.executable, "-c", "from slime_core.cli.main import main; main()"]
SOURCES = Path(__file__).parent / "third_party"


@dataclass(frozen=True)
class Installed:
    """Folders to put on PYTHONPATH, as if these distributions were installed beside slime."""

    folders: tuple[Path, ...]

    def env(self, **variables: str) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, self.folders)), **variables}

    def python(self, code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self._run([sys.executable, "-c", code, *arguments], variables)

    def slime(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """The `slime` command, with these distributions."""
        return self._run([*SLIME, *words], variables)

    def _run(self, command: Sequence[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=self.env(**variables), capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def install_third_party(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Installed]:
    """`install_third_party("acme-slime", ...)`: builds each source folder of third_party/ into a wheel, once, and
    installs it. No index is asked: hatchling is here already, and dependencies are not installed. `requires`: what the
    distributions require in place of the requirement in their pyproject.toml."""
    folders: dict[tuple[str, str], Path] = {}

    def install(*names: str, requires: str = "") -> Installed:
        for name in names:
            if (name, requires) not in folders:
                folders[name, requires] = build_and_install(SOURCES / name, tmp_path_factory.mktemp(name), requires)
        return Installed(tuple(folders[name, requires] for name in names))

    return install


def build_and_install(source: Path, work: Path, requires: str) -> Path:
    # A copy, so that the build leaves nothing in the checkout.
    copy = shutil.copytree(source, work / "source", ignore=shutil.ignore_patterns("__pycache__"))
    if requires:
        project = copy / "pyproject.toml"
        project.write_text(re.sub(r"(?m)^dependencies = .*$", f'dependencies = ["{requires}"]', project.read_text()))
    wheels, target = work / "wheels", work / "site"
    wheels.mkdir()
    build = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(wheels)], cwd=copy, check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    options = ["--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run([*installer(), *options], check=True, capture_output=True)
    return target


def installer() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install"]
    uv = shutil.which("uv")
    assert uv is not None, "neither pip nor uv is there to install a wheel"
    return [uv, "pip", "install"]


TINY_RUN = """\
name = "tiny"
runs_dir = "runs"
backend = "fsdp"
engine = "local"
reward = "gsm8k"
algo = "grpo"
[model]
hf_checkpoint = "base"
[data]
prompt_data = "train.jsonl"
input_key = "prompt"
label_key = "label"
[rollout]
rollout_batch_size = 2
n_samples_per_prompt = 2
rollout_max_response_len = 4
[train]
num_rollout = 5
lr = 1e-3
[checkpoint]
save_interval = 1
keep_checkpoints = 3
save_hf = false
"""


@dataclass(frozen=True)
class Ended:
    """The exit code, output and errors of a `slime` command."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The paragraph of the error."""
        assert "Traceback" not in self.err, self.err
        before, found, message = self.err.rpartition("error: ")
        assert found, f"no error was reported: {self.err or self.out}"
        assert not before or before.endswith("\n"), self.err
        assert "\n\n" not in message, f"more than one paragraph: {message}"
        assert self.code != 0, message
        return message


class TinyRun:
    """A folder with run.toml, base/ (a model) and train.jsonl, and the `slime` command in it: started, or, with `warm`,
    forked."""

    def __init__(self, folder: Path, warm: WarmSlime | None = None) -> None:
        self.folder = folder
        self.warm = warm

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def start(self, *words: str) -> subprocess.Popen[str]:
        """In a process group of its own, which Ctrl-C can be sent to."""
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [*SLIME, *words], cwd=self.folder, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    def slime(self, *words: str) -> Ended:
        if self.warm is not None:
            return Ended(*self.warm.run(words, self.folder))
        return self.end(self.start(*words))

    def run(self, *words: str) -> Ended:
        return self.slime("run", "run.toml", *words)

    @staticmethod
    def end(process: subprocess.Popen[str], timeout_s: float = 240) -> Ended:
        try:
            out, err = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
        return Ended(process.returncode, out, err)

    def steps(self, axis: str = "rollout/step", run: str = "tiny") -> list[int]:
        """The steps in metrics.jsonl, in its order."""
        return [record["step"] for record in self.metrics(run) if record["axis"] == axis]

    def steps_so_far(self) -> list[int]:
        """Those of a run that writes: its file may not be there yet, or end in the middle of a line."""
        file = self.runs / "tiny/metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return [record["step"] for record in records if record["axis"] == "rollout/step"]

    def metrics(self, run: str = "tiny") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.runs / run / "metrics.jsonl").read_text().splitlines()]

    def checkpoints(self, run: str = "tiny") -> list[str]:
        return sorted(path.parent.name for path in (self.runs / run / "checkpoints").glob("step_*/COMPLETE"))


@pytest.fixture(scope="session")
def tiny_base(warm: WarmSlime, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model for all tests: 10 thousand parameters, a character each for digits and signs."""
    base = tmp_path_factory.mktemp("tiny") / "base"
    sizes = ["--hidden-size", "32", "--num-layers", "1", "--intermediate-size", "64", "--max-length", "64"]
    made = Ended(*warm.run(["models", "new", str(base), "--alphabet", "0123456789+= ", *sizes], base.parent))
    assert made.code == 0, made.err
    return base


@pytest.fixture(scope="session")
def make_tiny(tiny_base: Path) -> Callable[[Path], TinyRun]:
    """Puts a run file, data and the model into a folder."""

    def make(folder: Path) -> TinyRun:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.toml").write_text(TINY_RUN)
        rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(5) for b in range(4)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        shutil.copytree(tiny_base, folder / "base")
        return TinyRun(folder)

    return make


@pytest.fixture
def tiny(make_tiny: Callable[[Path], TinyRun], tmp_path: Path) -> TinyRun:
    return make_tiny(tmp_path)


@pytest.fixture
def tiny_forks(tiny: TinyRun, warm: WarmSlime) -> None:
    """`tiny.run` is a fork: for tests that do not test the start."""
    tiny.warm = warm
