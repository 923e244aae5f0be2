"""Commands that plugins provide: listed without an import, loaded when typed, and every way in which that fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slime_core import __version__, groups
from slime_core.cli.commands import docstring
from slime_core.cli.main import app
from slime_core.errors import PluginError

HELLO = """
'''Print hello: to one, or to all. It is polite.

More that the help line leaves out.
'''
import typer

app = typer.Typer()

@app.command()
def greet(name: str, loud: bool = False) -> None:
    '''Greet NAME.'''
    typer.echo(f"{'HELLO' if loud else 'hello'} {name}")
"""
PASSING_ON = """
import typer

app = typer.Typer()

@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def anything(context: typer.Context) -> None:
    typer.echo(" ".join(context.args))
"""
SEVERAL = """
'''Several words.'''
import typer

app = typer.Typer(no_args_is_help=True)

@app.command()
def one() -> None:
    typer.echo("1")

@app.command()
def two() -> None:
    typer.echo("2")
"""
IMPORTED = """
import atexit, json, sys
atexit.register(lambda: sys.stderr.write("\\n" + json.dumps(sorted(sys.modules))))
from slime_core.cli.main import main
main()
"""


def slime(*words, code=0):
    wide = {"COLUMNS": "80"}
    result = CliRunner().invoke(app, list(words), catch_exceptions=False, prog_name="slime", env=wide)
    assert result.exit_code == code, result.output
    return result.output


def refused(*words):
    with pytest.raises(PluginError) as caught:
        CliRunner().invoke(app, list(words), catch_exceptions=False)
    return str(caught.value)


def help_lines(*words):
    """Names of commands to their lines."""
    printed = slime(*words, "--help").partition("Commands:\n")[2]
    return {line.split()[0]: " ".join(line.split()[1:]) for line in printed.splitlines() if line.strip()}


def imported(*words, path):
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, *words],
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.fixture
def hello(site):
    site.add("acme-slime", {groups.COMMANDS: {"hello": "acme_hello:app"}}, {"acme_hello": HELLO})
    return site


def test_a_command_is_listed_without_an_import_and_loaded_when_typed(hello):
    assert help_lines()["hello"] == "Print hello: to one, or to all."
    assert "acme_hello" not in sys.modules
    assert slime("hello", "you", "--loud") == "HELLO you\n"
    assert "Usage: slime hello [OPTIONS]" in slime("hello", "--help")
    assert "completion" not in slime("hello", "--help")
    assert "acme_hello" in sys.modules


def test_help_imports_no_plugin_and_nothing_heavy(hello):
    """And the kernel has few commands of its own."""
    found = imported("--help", path=hello.folder)
    ours = {name.partition(".")[0] for name in found if name.startswith(("slime", "acme"))}
    assert ours == {"slime_core"}
    assert not {"torch", "ray", "transformers", "rich", "pydantic", "numpy", "stevedore", "pluggy", "click"} & found
    assert "acme_hello" in imported("hello", "you", path=hello.folder)


def test_every_command_of_this_checkout_is_listed_with_its_line():
    assert help_lines() == {
        "run": "Train: slime run run.toml [--flag value ...]",
        "compare": "Compare runs: what they reached, and where their configs differ.",
        "eval": "Evaluate a model on the run file's evaluation sets.",
        "plugins": "List, check and describe plugins.",
        "compat": "Translate a launch line of another trainer into a run file:...",
        "config": "Describe the keys of a run file.",
        "convert": "Convert a model folder: slime convert SOURCE TARGET --to NAME.",
        "doctor": "Look at Python, packages, devices, Ray, plugins, engines, ports,...",
        "models": "Shapes of public models, and models with random weights.",
        "new": "Write a distribution that passes the contract kit: slime new...",
        "plan": "What a run would do and whether it fits, before anything is...",
        "serve": "Serve programs of the Tinker SDK: slime serve run.toml.",
        "view": "Look at runs, on a page in the browser or in the terminal.",
    }
    assert list(help_lines("plugins")) == ["algorithms", "check", "show"]


def test_settings_of_a_command_come_with_it(site):
    site.add("acme-slime", {groups.COMMANDS: {"any": "acme_any:app"}}, {"acme_any": PASSING_ON})
    assert slime("any", "x", "--nope", "3", "--help") == "x --nope 3 --help\n"
    assert help_lines()["any"] == ""


def test_a_command_may_be_a_group(site):
    site.add("acme-slime", {groups.COMMANDS: {"several": "acme_several:app"}}, {"acme_several": SEVERAL})
    assert slime("several", "two") == "2\n"
    assert set(help_lines("several")) == {"one", "two"}


def test_a_dotted_name_is_a_subcommand(site):
    site.add("acme-slime", {groups.COMMANDS: {"plugins.hello": "acme_hello:app"}}, {"acme_hello": HELLO})
    assert "hello" not in help_lines()
    assert help_lines("plugins")["hello"] == "Print hello: to one, or to all."
    assert slime("plugins", "hello", "you") == "hello you\n"


def test_two_distributions_with_one_command(hello):
    hello.add("rival-slime", {groups.COMMANDS: {"hello": "acme_rival:app"}}, version="2.0")
    conflict = "slime hello: offered by acme-slime 0.1.0 and rival-slime 2.0. Uninstall acme-slime, or switch it off: "
    assert refused("hello", "you") == f"{conflict}SLIME_PLUGINS_DENY=acme-slime."
    assert help_lines()["hello"] == "Offered by acme-slime 0.1.0 and by rival-slime 2.0."
    assert "acme_hello" not in sys.modules


def test_a_denied_twin_leaves_no_conflict(hello, monkeypatch):
    hello.add("rival-slime", {groups.COMMANDS: {"hello": "acme_rival:app"}})
    monkeypatch.setenv("SLIME_PLUGINS_DENY", "rival-slime")
    assert slime("hello", "you") == "hello you\n"


@pytest.mark.parametrize("name", ["run", "plugins"])
def test_a_plugin_that_provides_a_command_of_the_kernel(site, name):
    site.add("acme-slime", {groups.COMMANDS: {name: "acme_hello:app"}}, {"acme_hello": HELLO})
    assert f"slime {name}: offered by slime-rl {__version__} and acme-slime 0.1.0. Uninstall acme-slime" in refused(
        name
    )
    assert "acme_hello" not in sys.modules


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "import nothing_like_it",
            "hello of acme-slime 0.1.0 (acme_hello:app) cannot be imported: the module nothing_like",
        ),
        ("1 / 0", "hello of acme-slime 0.1.0 (acme_hello:app) cannot be imported: ZeroDivisionError"),
        (
            "def app(): ...",
            "hello of acme-slime 0.1.0 (acme_hello:app) is an object of type function; slime.commands takes",
        ),
    ],
)
def test_a_command_that_cannot_be_loaded_names_its_distribution(site, source, expected):
    site.add("acme-slime", {groups.COMMANDS: {"hello": "acme_hello:app"}}, {"acme_hello": source})
    assert "hello" in help_lines()
    assert refused("hello").startswith(f"slime hello: {expected}")


def test_a_command_that_is_switched_off(hello, monkeypatch):
    monkeypatch.setenv("SLIME_PLUGINS_DENY", "acme-slime")
    assert "hello" not in help_lines()
    assert refused("hello") == (
        'command = "hello": acme-slime 0.1.0 offers it, but SLIME_PLUGINS_DENY switches acme-slime off.'
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("plan", "run.toml"),
            "slime plan: not installed. plan comes with slime-preflight: pip install slime-preflight.",
        ),
        (
            ("plugins", "--check", "--json"),
            "slime plugins check: not installed. plugins.check comes with slime-plugin-kit",
        ),
        (("plugins", "show", "x"), "slime plugins show: not installed. plugins.show comes with slime-plugin-kit: pip"),
    ],
)
def test_a_known_command_that_is_not_installed(monkeypatch, words, expected):
    monkeypatch.setattr("slime_core.registry.registry.installed_entries", dict)
    assert refused(*words).startswith(expected)
    assert set(help_lines()) == {"run", "plugins"}


def test_an_unknown_command_is_refused_with_close_matches(hello):
    assert "No such command 'helo'. Did you mean 'hello'?" in slime("helo", code=2)


@pytest.mark.parametrize(
    ("files", "docstrings"),
    [
        ({"acme_place.py": "'''At the top.'''\n1 / 0"}, {"acme_place": "At the top."}),
        (
            {
                "acme_place/__init__.py": "1 / 0",
                "acme_place/below/__init__.py": "'A package.'",
                "acme_place/one.py": "'One.'",
            },
            {"acme_place.one": "One.", "acme_place.below": "A package.", "acme_place": "", "acme_place.none": ""},
        ),
        ({"acme_place.py": "'''No end"}, {"acme_place": "", "acme_place_else": ""}),
    ],
    ids=["module", "package", "broken"],
)
def test_docstrings_are_read_from_the_source(site, files, docstrings):
    for name, text in files.items():
        path = Path(site.folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert {module: docstring(module) for module in docstrings} == docstrings
    assert not {name for name in sys.modules if name.startswith("acme_place")}
