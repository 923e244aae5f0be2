"""`slime doctor`: on this machine, and on one where things are missing."""

import importlib.metadata
import importlib.util

import torch

from slime_core.registry import Registry
from slime_preflight import examination
from slime_preflight.examination import State, examine

UNFIT = {
    "slime-rl": ["numpy>=2.0", "slime-core>=0.1", "torch>=99", "no-such-thing>=1", "ray>=99; extra == 'ray'"],
}


def by(found, what):
    return [one for one in found if one.what == what]


def test_this_machine_is_well(monkeypatch):
    found = examine(Registry())
    assert not [one for one in found if one.state is State.BAD]
    assert {"python", "packages", "backend", "engine", "algorithm", "ports", "open files", "disk"} <= {
        one.what for one in found
    }


def test_missing_things_are_reported_with_advice(monkeypatch):
    requires = importlib.metadata.requires
    monkeypatch.setattr(importlib.metadata, "requires", lambda dist: UNFIT.get(dist) or requires(dist))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find_spec(name))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(examination, "PYTHONS", ((4, 0), (4, 1)))
    monkeypatch.setattr(examination, "FEW_FILES", 2**62)
    found = examine(Registry(deny=["slime-grpo"]))
    assert {(one.detail, one.advice) for one in by(found, "packages")} == {
        (f"slime-rl requires torch>=99, and there is {torch.__version__}", "pip install 'torch>=99'"),
        ("slime-rl requires no-such-thing>=1, and there is none", "pip install 'no-such-thing>=1'"),
    }
    assert by(found, "ray")[0].advice == "pip install 'slime-rl[ray]'"
    assert "built for CUDA 13.0 and sees no device" in by(found, "devices")[0].detail
    assert by(found, "python")[0].state is State.BAD
    assert by(found, "open files")[0].advice.startswith("ulimit -n")


def test_a_foreign_kernel_and_distributions_that_require_it_are_reported(tmp_path, monkeypatch):
    """slime-core on PyPI is another project; a wheel that requires it only for an extra can still be used."""
    for name, requires in (
        ("slime-core", ""),
        ("acme-old", "slime-core>=0.1,<0.2"),
        ("acme-extra", "slime-core[testing]; extra == 'testing'"),
        ("acme-new", "slime-rl>=0.2"),
    ):
        info = tmp_path / f"{name.replace('-', '_')}-3.1.dist-info"
        info.mkdir()
        required = f"Requires-Dist: {requires}\n" if requires else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 3.1\n{required}")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = by(examine(Registry()), "slime-core")
    assert sorted((one.detail.split()[0], one.state) for one in found) == [
        ("acme-extra", State.NOTE),
        ("acme-old", State.BAD),
        ("slime-core", State.BAD),
    ]
    (foreign,) = [one for one in found if one.detail.startswith("slime-core 3.1 is installed beside slime-rl")]
    assert foreign.advice.startswith("pip uninstall slime-core && ")
