"""One-file plugins: names from marks, identity from content, and no need for the file once it was read."""

import hashlib
import inspect
import pickle
import traceback
from textwrap import dedent
from types import SimpleNamespace

import pytest

from slime_core import groups
from slime_core.contracts.hookspecs import StepTrained
from slime_core.errors import PluginError
from slime_core.registry import Registry, Status, bind
from slime_core.registry.hooks import Hooks
from slime_core.registry.plugin_file import PluginFile

TEXT = '''
"""A quick idea."""
from pydantic import Field
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.reward import RewardDriver
from slime_core.plugin import group_filter, hook, kl, reward

@reward("short")
def short(sample):
    """Shorter is better."""
    return -float(len(sample.response))

also_short = short

@group_filter("any")
def keep_any(group):
    return True

class Config(DriverConfig):
    scale: float = Field(1.0, gt=0)
    """What the length is multiplied by."""

@reward("scaled")
class Scaled(RewardDriver):
    """Scaled length."""
    Config = Config
    @classmethod
    def build(cls, config):
        return config

class Unnamed(Scaled):
    pass

@hook
def step_trained(event):
    raise ValueError(f"seen {event.rollout_id}")
'''


@pytest.fixture
def write(site, tmp_path):
    def write_file(text, name="my_reward.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
        return path

    return write_file


def test_marked_things_become_entries_with_the_file_as_distribution(write):
    path = write(TEXT)
    registry = Registry([path])
    version = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    mine = [(e.group, e.name, e.version, e.target) for e, s in registry.listing() if e.dist == "my_reward.py"]
    assert mine == [
        (groups.HOOKS, "my_reward", version, "my_reward.py"),
        (groups.FILTERS, "any", version, "my_reward.py:keep_any"),
        (groups.REWARDS, "scaled", version, "my_reward.py:Scaled"),
        (groups.REWARDS, "short", version, "my_reward.py:short"),
    ]
    driver = registry.resolve(groups.REWARDS, "my_reward.py/short", where="reward.name").driver
    group = SimpleNamespace(samples=[SimpleNamespace(response="abc")])
    assert driver.build(driver.Config()).score(group) == [-3.0]


def test_a_worker_without_the_file_has_the_same_entries(write):
    path = write(TEXT)
    there = Registry([path])
    sent = pickle.loads(pickle.dumps(there.plugin_files))  # noqa: S301
    path.unlink()
    here = Registry(sent)
    assert here.plugin_files == there.plugin_files
    assert here.entries() == there.entries()
    bound = bind(here.resolve(groups.REWARDS, "scaled", where="reward"), {"scale": "2"}, where="reward")
    assert bound.scale == 2.0


def test_source_and_tracebacks_come_from_the_text_not_from_the_disk(write):
    path = write(TEXT)
    registry = Registry([path])
    path.write_text("# something else by now\n" * 60)
    short = registry.load(registry.find(groups.REWARDS, "short", where="x"), where="x")
    assert "Shorter is better" in inspect.getsource(short)
    with pytest.raises(ZeroDivisionError) as caught:
        short(Exploding())
    assert "return -float(len(sample.response))" in "".join(traceback.format_exception(caught.value))


class Exploding:
    @property
    def response(self):
        return 1 / 0


def test_field_docstrings_are_read_without_the_file(write):
    path = write(TEXT)
    file = PluginFile.read(path)
    path.unlink()
    config = Registry([file]).resolve(groups.REWARDS, "scaled", where="x").driver.Config
    assert config.model_fields["scale"].description == "What the length is multiplied by."


def test_two_contents_never_share_a_module(write):
    first, second = PluginFile.read(write(TEXT)), PluginFile.read(write(TEXT + "\n# changed\n"))
    assert first.module_name != second.module_name
    assert first.sha256 != second.sha256


def test_a_name_that_is_installed_too_is_a_duplicate_when_used(site, write):
    site.add("acme-slime", {groups.REWARDS: {"short": "m:A"}})
    registry = Registry([write(TEXT)])
    with pytest.raises(PluginError, match=r'"acme-slime/short" or "my_reward\.py/short"'):
        registry.find(groups.REWARDS, "short", where="reward.name")
    assert registry.find(groups.REWARDS, "my_reward.py/short", where="reward.name").dist == "my_reward.py"
    assert {s for e, s in registry.listing() if e.name == "short"} == {Status.DUPLICATE}


def test_its_observers_are_registered(write):
    hooks = Hooks.load(Registry([write(TEXT)], allow=[]))
    assert hooks.names == ["my_reward.py/my_reward"]
    with pytest.raises(PluginError, match=r"my_reward\", step_trained: raised ValueError: seen 7.* leave out --plugin"):
        hooks.emit(StepTrained(run=None, rollout_id=7, report=None))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\n\nraise KeyError('no')\n", "my_reward.py, line 3: KeyError: 'no'"),
        ("def f(:\n  pass\n", "my_reward.py, line 1: SyntaxError"),
        ("import sys\nsys.exit(0)\n", "my_reward.py, line 2: SystemExit: 0"),
        ("import not_there_either\n", "ModuleNotFoundError: No module named 'not_there_either'"),
        ("def reward(sample):\n    return 1.0\n", "registers nothing. Mark a function with a decorator"),
        ("from slime_core.plugin import reward\n@reward\ndef f(s): return 1.0\n", 'write @reward("name"), not @reward'),
        (
            "from slime_core.plugin import reward\n@reward('Big Name')\ndef f(s): return 1.0\n",
            '"Big Name" cannot be a name',
        ),
        (
            "from slime_core.plugin import reward\n@reward('a')\ndef f(s): return 1.0\n@reward('a')\ndef g(s): return 2.0\n",
            'gives the name "a" in slime.rewards twice (my_reward.py:f, my_reward.py:g)',
        ),
        ("from slime_core.plugin import driver\n@driver('slime.reward', 'x')\ndef f(s): ...\n", "unknown group"),
    ],
)
def test_the_error_of_an_unusable_file_gives_the_line_and_the_reason(write, text, expected):
    with pytest.raises(PluginError) as caught:
        Registry([write(text)])
    assert expected in str(caught.value)
    assert str(caught.value).startswith("--plugin ")


def test_a_failed_file_can_be_fixed_in_the_same_process(write):
    path = write("raise ValueError('first')")
    for _ in range(2):
        with pytest.raises(PluginError, match="ValueError: first"):
            Registry([path])
    assert Registry([write(TEXT)]).entries(groups.REWARDS)


def test_a_missing_module_beside_the_file_is_reported(write):
    write("x = 1", name="friend.py")
    with pytest.raises(PluginError, match="A plugin file must be one file: friend beside it is not sent to workers"):
        Registry([write("from friend import x")])


def test_marks_that_were_imported_are_not_its_own(site, write):
    site.add(
        "acme-slime",
        {},
        {"acme_marked": "from slime_core.plugin import reward\n@reward('theirs')\ndef f(sample): return 1.0\n"},
    )
    text = "from acme_marked import f\nfrom slime_core.plugin import reward\n@reward('mine')\ndef g(sample): return f(sample)\n"
    assert [e.name for e in Registry([write(text)]).entries() if e.dist == "my_reward.py"] == ["mine"]


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00junk"])
def test_not_a_readable_python_file(tmp_path, content):
    path = tmp_path / "x.py"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PluginError, match=r"x\.py: .*Give one Python file"):
        PluginFile.read(path)
