"""All distributions are released together: one version, and they require each other's minor release."""

import importlib.util
import tomllib
from pathlib import Path

from slime_core import __version__

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("version", ROOT / "tests" / "wheels" / "version.py")
version = importlib.util.module_from_spec(spec)
spec.loader.exec_module(version)


def test_every_distribution_has_the_kernels_version():
    found = {path: tomllib.loads(path.read_text())["project"] for path in version.projects()}
    assert len(found) > 20
    assert {project["version"] for project in found.values()} == {__version__}
    required = version.requirement(__version__)
    for path, project in found.items():
        extras = project.get("optional-dependencies", {}).values()
        for line in (*project.get("dependencies", ()), *(line for extra in extras for line in extra)):
            if line.startswith("slime-") and ">=" in line:
                assert line.partition(";")[0].strip().endswith(required), f"{path}: {line}"


def test_the_next_release_is_set_everywhere(tmp_path, monkeypatch):
    for path in (version.KERNEL, *version.projects()):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    monkeypatch.setattr(version, "ROOT", tmp_path)
    monkeypatch.setattr(version, "KERNEL", tmp_path / "slime_core" / "__init__.py")
    version.set_version("0.3.0")
    assert '__version__ = "0.3.0"' in (tmp_path / "slime_core" / "__init__.py").read_text()
    grpo = tomllib.loads((tmp_path / "plugins" / "slime-grpo" / "pyproject.toml").read_text())["project"]
    assert grpo["version"] == "0.3.0"
    assert "slime-rl>=0.3,<0.4" in grpo["dependencies"]
