"""One run of the kit over everything that is wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The suite is collected with importlib, which does not put its folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

from acme_faults.entries import ENTRIES, MODEL_ENTRIES
from kit_run import ForkedKit, KitRun, install, run_kit, shipped


@pytest.fixture(scope="session")
def forked_kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedKit]:
    """For what is not about the start of pytest: test_kit.py has runs that are started, and so are the two large ones."""
    kit = ForkedKit(tmp_path_factory.mktemp("kit"))
    yield kit
    kit.close()


@pytest.fixture(scope="session")
def faults(forked_kit: ForkedKit, tmp_path_factory: pytest.TempPathFactory) -> KitRun:
    folder = tmp_path_factory.mktemp("faults")
    install(folder, "acme-faults", ENTRIES)
    return forked_kit(folder, "--tb=native", "--slime-plugin", "acme-faults", path=[folder, Path(__file__).parent])


@pytest.fixture(scope="session")
def mutant(forked_kit: ForkedKit, tmp_path_factory: pytest.TempPathFactory) -> KitRun:
    folder = tmp_path_factory.mktemp("mutant")
    install(folder, "acme-faults", ENTRIES)
    words = [
        "--tb=native",
        "-p",
        "acme_faults.mutants",
        "--slime-plugin",
        "acme-faults",
        "-k",
        "algorithms and right_recipe",
    ]
    return forked_kit(folder, *words, path=[folder, Path(__file__).parent])


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> KitRun:
    """Of what ships with a backend or an engine, and of those with faults: what they import takes longer than their cases."""
    folder = tmp_path_factory.mktemp("models")
    install(folder, "acme-models", MODEL_ENTRIES)
    dists = ["acme-models", *shipped(with_a_model=True)]
    # Two ranks take processes of their own each time: one plugin has to show that they are looked at.
    chosen = " or ".join(["not any_layout", "careless_sums", *shipped(with_a_model=True)])
    words = ["--tb=native", "-k", chosen, *(word for dist in dists for word in ("--slime-plugin", dist))]
    return run_kit(folder, *words, path=[folder, Path(__file__).parent])
