"""Servers that are started by another interpreter than the run's."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from slime_serving.interpreter import linked_packages
from slime_sglang.launching import MODULE, PACKAGES
from slime_sglang.plugin import Sglang

SOURCE = """
class ServerArgs:
    mem_fraction_static: A[float | None, "Share."] = None
    schedule_policy: A[str, Arg(help="Policy.", choices=["lpm", "fcfs"])] = "fcfs"
    cuda_graph_bs: list[int] | None = None
"""


@pytest.fixture
def python(tmp_path):
    """An interpreter with an SGLang of its own, and no other packages."""
    package = tmp_path / "site" / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "srt" / "server_args.py").write_text(SOURCE)
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/site:$PYTHONPATH exec {sys.executable} -S "$@"\n')
    script.chmod(0o700)
    return str(script)


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"mem_fraction_static": 0.5, "schedule_policy": "lpm"}, []),
        ({"schedule_policy": "lmp"}, ["engine.schedule_policy = 'lmp'", "lpm, fcfs"]),
        ({"mem_fraction_statics": 0.5}, None),
        ({"cuda_graph_bs_decode": [1]}, ["engine.cuda_graph_bs_decode: SGLang", "Close: cuda_graph_bs"]),
    ],
)
def test_its_sglang_is_asked_for_names_and_choices(options, texts, python):
    if texts is None:
        # Options that no known version has are refused before.
        with pytest.raises(ValueError, match="mem_fraction_static"):
            Sglang.Config(python=python, **options)
        return
    problems = Sglang.problems(Sglang.Config(python=python, **options))
    assert len(problems) == bool(texts)
    assert all(text in problems[0] for text in texts)


def test_an_interpreter_without_sglang_is_a_problem(tmp_path):
    (problem,) = Sglang.problems(Sglang.Config(python=str(tmp_path / "none")))
    assert problem.startswith("engine.python:")
    assert "--sglang-python FOLDER/bin/python" in problem


def test_only_slimes_packages_are_beside_it(python):
    """Those that the server's program imports, and none of this interpreter's others."""
    with linked_packages(*PACKAGES) as folder:
        code = (
            f"import {', '.join(PACKAGES)}, importlib.util as u; print(slime_core.__path__[0], u.find_spec('pydantic'))"
        )
        done = subprocess.run(
            [python, "-c", code], cwd=folder, env={"PYTHONPATH": folder}, capture_output=True, text=True, check=True
        )
    assert done.stdout.split() == [f"{folder}/slime_core", "None"]
    assert {name.split(".")[0] for name in imported_by(MODULE)} == set(PACKAGES)


def imported_by(module):
    """Modules of slime that it imports, also in functions, and those that these import."""
    found, new = set(), {module}
    while new:
        found |= new
        new = {name for each in new for name in imports_of(each)} - found
    return found


def imports_of(module):
    spec = importlib.util.find_spec(module)
    tree = ast.parse(Path(spec.origin).read_bytes())
    typed = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith("slime_")
            and id(node) not in typed
        ):
            yield node.module
