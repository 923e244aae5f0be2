"""The contract kit's engine suite, every property of it, on one server that is given its first weights again each time.

`pytest --slime-plugin slime-sglang` runs the same with a new server for each property.
"""

import re
import subprocess
import sys

import pytest

from slime_plugin_kit.attached_case import AttachedCase, properties_of
from slime_sglang.plugin import Sglang

HAS, LACKS = properties_of(Sglang)


@pytest.mark.sglang
@pytest.mark.parametrize("name", HAS)
def test_property(name, attached, tiny):
    AttachedCase(Sglang, attached).keep(name, tiny)


def test_what_it_lacks():
    assert LACKS == []


def test_the_contract_without_a_server(tmp_path):
    """All of the kit but the engine suite, as an author would run it."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--slime-plugin", "slime-sglang"]
    done = subprocess.run(
        [*command, "-k", "not engines.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert not re.search(r"\d+ (failed|errors?)", done.stdout), done.stdout
    assert re.search(r"\d+ passed", done.stdout), done.stdout
    left = re.findall(r"^NOT RUN (\S+)", done.stdout, re.MULTILINE)
    assert [name for name in left if not name.startswith(("engines::", ":"))] == []
