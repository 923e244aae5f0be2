"""`slime doctor`: on this machine, and on one where things are missing."""

import importlib.metadata
import importlib.util
import py_compile
import sys

import torch

from slime_core.registry import Registry
from slime_preflight import examination
from slime_preflight.engine_programs import engine_programs
from slime_preflight.examination import examine
from slime_preflight.found import State
from slime_serving import interpreter

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


def test_packages_that_are_compiled_in_every_process_are_reported(tmp_path, monkeypatch):
    (tmp_path / "slow_to_compile.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(examination, "SLOW_TO_COMPILE", ("slow_to_compile", "is_not_there"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (found,) = examination.bytecode(Registry())
    assert found.state is State.NOTE
    assert found.detail.startswith("none of slow_to_compile, and PYTHONDONTWRITEBYTECODE is set")
    assert "-m compileall" in found.advice
    py_compile.compile(str(tmp_path / "slow_to_compile.py"))
    (found,) = examination.bytecode(Registry())
    assert found.state is State.GOOD


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


def test_interpreters_that_start_engines_are_looked_at(tmp_path, monkeypatch):
    """A tested version, another one, an interpreter without any, and a torch that sees fewer GPUs than the run's own."""
    folder = tmp_path / "site"
    for version, package in (("0.32.0+cpu", "vllm"), ("9.9", "sglang")):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").touch()
        info = folder / f"{package}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o700)
    gpus = interpreter.TorchDevices(version="2.13", cuda="13.0", gpus=("H100",))
    own = interpreter.torch_in
    monkeypatch.setattr("slime_preflight.engine_programs.torch_in", lambda path: gpus if path is None else own(path))
    found = list(engine_programs(Registry(), [str(python), str(tmp_path / "none")]))
    (vllm,) = [one for one in by(found, "vllm") if str(python) in one.detail]
    assert (vllm.state, vllm.detail) == (State.GOOD, f"vLLM 0.32.0+cpu, started with --vllm-python {python}")
    (sglang,) = [one for one in by(found, "sglang") if str(python) in one.detail]
    assert (sglang.state, sglang.advice) == (State.NOTE, "slime was tested with SGLang 0.5.20, 0.5.16.")
    (there,) = by(found, str(python))
    assert there.state is State.BAD
    assert f"torch {torch.__version__} for CPUs, which sees no GPU" in there.detail
    (missing,) = by(found, str(tmp_path / "none"))
    assert missing.state is State.BAD
    assert "cannot be run" in missing.detail
