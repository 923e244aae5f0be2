"""Files of a run folder that were damaged on disk: the run that continues names the file, and trains nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import TinyRun
    from slime_plugin_kit.warm_slime import WarmSlime

pytestmark = pytest.mark.faults

WORDS = ("--keep-checkpoints", "9")


@pytest.fixture(scope="module")
def killed(make_tiny: Callable[[Path], TinyRun], warm: WarmSlime, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run of five steps of which three are saved."""
    tiny = make_tiny(tmp_path_factory.mktemp("killed"))
    tiny.warm = warm
    ended = tiny.run(*WORDS)
    assert ended.code == 0, ended.err
    for step in (4, 5):
        shutil.rmtree(tiny.runs / f"tiny/checkpoints/step_{step}")
    (tiny.runs / "tiny/summary.json").unlink()
    return tiny


@pytest.fixture
def resumed(killed: TinyRun, warm: WarmSlime, tmp_path: Path) -> TinyRun:
    """A copy of it under the same path, since the folder is part of no run's identity."""
    kept = shutil.copytree(killed.runs, tmp_path / "kept")
    yield killed
    shutil.rmtree(killed.runs)
    shutil.copytree(kept, killed.runs)


CHECKPOINT = "checkpoints/step_3"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"{CHECKPOINT}/state.json", "step_3: damaged: state.json is not what was written (CRC-32 "),
        (f"{CHECKPOINT}/COMPLETE", "step_3: damaged: COMPLETE cannot be read: "),
        (
            f"{CHECKPOINT}/buffer/buffer.parquet",
            "step_3: damaged: buffer/buffer.parquet is not what was written (CRC-32 ",
        ),
        (f"{CHECKPOINT}/trainer/actor/state", "step_3: damaged: trainer/actor/state/shard-00001-model-00001-of-00001"),
        ("manifest.json", "manifest.json: damaged: "),
        ("metrics.jsonl", "metrics.jsonl:1: damaged: "),
        ("attempts", "attempts: damaged: "),
    ],
)
def test_a_byte_that_changed(resumed: TinyRun, name: str, expected: str) -> None:
    path = resumed.runs / "tiny" / name
    if path.is_dir():
        (path,) = path.iterdir()
    content = bytearray(path.read_bytes())
    # Of safetensors in the middle of the tensors, where no format has a check of its own.
    place = len(content) * 3 // 4 if path.suffix == ".safetensors" else 0
    content[place] ^= 0xFF
    path.write_bytes(bytes(content))
    ended = resumed.run(*WORDS)
    assert ended.code == 7, ended.err
    assert expected in ended.error
    assert ("--ckpt-step 2" in ended.error) == name.startswith(CHECKPOINT)
    assert [folder.name for folder in resumed.runs.iterdir()] == ["tiny"]
    assert resumed.steps() == list(range(5)) if name != "metrics.jsonl" else True

    # The way out that the message names.
    if name.startswith(CHECKPOINT):
        assert resumed.run(*WORDS, "--ckpt-step", "2").code == 0
        assert resumed.steps() == list(range(5))
