"""The manifest of a backend's checkpoint, written and read."""

import pytest

from slime_core.errors import CheckpointError
from slime_training.checkpoint_manifest import Manifest

WRITTEN = Manifest(
    format=2, steps_done=7, world_size=4, copies=["reference"], shapes={"w": [3, 2], "head": "lm"}, sizes={"rng": 9}
)


def read(file, expected_format=2):
    return Manifest.read(file, backend="acme", expected_format=expected_format)


def test_read_as_written(tmp_path):
    WRITTEN.write(tmp_path / "acme.json")
    assert read(tmp_path / "acme.json") == WRITTEN


def test_what_is_no_manifest(tmp_path):
    file = tmp_path / "acme.json"
    with pytest.raises(CheckpointError, match=r"acme\.json: no such file; .* not one of backend acme"):
        read(file)
    WRITTEN.write(file)
    with pytest.raises(CheckpointError, match=r"acme\.json: format 2; this version reads 3"):
        read(file, expected_format=3)
    text = file.read_text()
    for damaged in (text[:-9], text.replace("steps_done", "steps")):
        file.write_text(damaged)
        with pytest.raises(CheckpointError, match=r"acme\.json: cannot be read"):
            read(file)
