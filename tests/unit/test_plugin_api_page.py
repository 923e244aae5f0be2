"""The examples of docs/plugin-api.md and docs/how-to can be loaded as they are printed."""

import ast
import inspect
import re
import sys
import types
from pathlib import Path

import pytest

from slime_core import groups
from slime_core.contracts.algorithm import Recipe
from slime_core.contracts.driver import Driver
from slime_core.registry import Registry
from slime_core.registry.entry import Entry
from slime_core.registry.hooks import Hooks
from slime_core.registry.validation import ACCEPTED, kind_problem
from slime_viewer.panel import Panel

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (DOCS / "plugin-api.md", *sorted((DOCS / "how-to").glob("*.md")))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"# (\S+\.py)\n")


def blocks(installed):
    """`# my_reward.py` in the first line is a plugin file, `# src/acme/plugin.py` a module of a distribution."""
    for page in PAGES:
        for text in BLOCK.findall(page.read_text()):
            named = NAME.match(text)
            assert named, f"{page.name}: an example begins with the name of its file:\n{text}"
            if installed == named[1].startswith("src/"):
                yield pytest.param(named[1], text, id=f"{page.stem}/{Path(named[1]).name}")


@pytest.mark.parametrize(("name", "text"), list(blocks(installed=False)))
def test_a_plugin_file_registers_the_functions_that_it_marks(name, text, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    registry = Registry([path])
    ours = [entry for entry in registry.entries() if registry.is_file(entry)]
    assert ours
    for entry in ours:
        if entry.group == groups.HOOKS:
            Hooks({entry.qualified: registry.load(entry, where=name)})
            continue
        driver = registry.resolve(entry.group, entry.qualified, where=name).driver
        assert (driver.__doc__ or "").strip(), f"{entry.name} has no docstring"
        assert all(field.description for field in driver.Config.model_fields.values())


@pytest.mark.parametrize(("name", "text"), list(blocks(installed=True)))
def test_a_module_of_a_distribution_has_drivers_that_are_whole(name, text, tmp_path, monkeypatch):
    path = tmp_path / Path(name).name
    path.write_text(text)
    module = types.ModuleType(f"docs_example_{abs(hash(text))}")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(text, str(path), "exec"), module.__dict__)  # noqa: S102 - our own page
    here = [thing for thing in vars(module).values() if getattr(thing, "__module__", "") == module.__name__]
    drivers = [thing for thing in here if isinstance(thing, type) and issubclass(thing, Driver)]
    recipes = [thing for thing in vars(module).values() if isinstance(thing, Recipe)]
    group_of = {cls: group for group, kinds in ACCEPTED.items() for cls in kinds}
    for driver in drivers:
        group = next(group for cls, group in group_of.items() if issubclass(driver, cls))
        assert not kind_problem(Entry(group, "example", "acme", "1", f"{module.__name__}:{driver.__name__}"), driver)
    assert (
        drivers
        or recipes
        or "typer.Typer()" in text
        or any(isinstance(thing, Panel) for thing in vars(module).values())
    )


def test_every_extension_point_has_a_page():
    pages = "\n".join(page.read_text() for page in PAGES)
    groups_used = (*groups.DRIVER_GROUPS, groups.COMMANDS, groups.PANELS)
    assert not [group for group in groups_used if f'entry-points."{group}"]' not in pages and f"`{group}`" not in pages]


def test_every_decorator_is_documented():
    import slime_core.plugin as plugin

    page = (DOCS / "plugin-api.md").read_text()
    assert all(f"`{name}" in page for name in plugin.__all__)
    for function in (plugin.reward, plugin.advantage, plugin.loss, plugin.kl):
        named = next(line for line in page.splitlines() if line.startswith(f"| `{function.__name__}(name"))
        assert all(name in named for name in inspect.signature(function).parameters)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("types.prompt", "Prompt"),
        ("types.sample", "Sample"),
        ("types.batch", "Batch"),
        ("types.batch", "TokenColumns"),
        ("types.completion", "SamplingParams"),
        ("contracts.advantage", "CreditInputs"),
        ("contracts.advantage", "Credit"),
        ("contracts.loss", "LossInputs"),
        ("contracts.loss", "LossOutput"),
        ("contracts.generator", "Episode"),
        ("contracts.correction", "BatchCorrection"),
        ("contracts.filter", "FilterDecision"),
        ("contracts.filter", "Versions"),
    ],
)
def test_every_field_is_documented(module, name):
    page = (DOCS / "plugin-api.md").read_text()
    source = DOCS.parent / "slime_core" / Path(*module.split(".")).with_suffix(".py")
    node = next(n for n in ast.parse(source.read_text()).body if isinstance(n, ast.ClassDef) and n.name == name)
    fields = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign)]
    fields += [n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and name == "Episode"]
    assert not [field for field in fields if not re.search(rf"\b{field}\b", page)]
