"""Keys, and the errors of a command that would let strangers in."""

import subprocess
import sys
from pathlib import Path

import pytest

from slime_core.errors import ConfigError
from slime_plugin_kit.warm_slime import warm_slime
from slime_tinker.keys import Keys
from slime_tinker.run_command import chosen

SLIME = Path(sys.executable).parent / "slime"


def slime(*words, cwd):
    return subprocess.run([SLIME, *words], cwd=cwd, capture_output=True, text=True, timeout=120)


def test_a_key_is_printed_once_and_stored_as_a_hash(tmp_path):
    added = slime("serve", "keys", "add", "mine", cwd=tmp_path)
    key = added.stdout.strip()
    assert added.returncode == 0
    assert key.startswith("tml-")
    file = tmp_path / "slime-serve-keys.json"
    assert key not in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    keys = Keys.read(file)
    assert keys.tenant_of(key) == "mine"
    assert keys.tenant_of(key + "x") is None
    listed = slime("serve", "keys", "list", cwd=tmp_path).stdout
    assert "mine" in listed
    assert key not in listed
    assert slime("serve", "keys", "revoke", "mine", cwd=tmp_path).returncode == 0
    assert Keys.read(file).tenant_of(key) is None
    again = slime("serve", "keys", "revoke", "mine", cwd=tmp_path)
    assert again.returncode
    assert '"mine": has no key' in again.stderr


@pytest.mark.parametrize("name", ["", "Mine", "a/b", "a" * 41])
def test_names_of_tenants(name):
    with pytest.raises(ConfigError, match="lowercase"):
        Keys().added(name)


def test_a_tenant_may_have_two_keys():
    keys, old = Keys().added("mine")
    keys, new = keys.added("mine")
    assert {keys.tenant_of(old), keys.tenant_of(new)} == {"mine"}


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """Forks: the start of the command is tested above."""
    with warm_slime(
        tmp_path_factory.mktemp("warm"), ("slime_core.cli.main", "slime_tinker.run_command", "torch")
    ) as warm:
        yield warm


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "there are no keys. slime serve keys add NAME"),
        (("--no-keys", "--host", "0.0.0.0"), "without TLS"),
        (("--no-keys", "--tls-key", "run.toml"), "one is missing"),
        (
            ("--no-keys", "--host", "0.0.0.0", "--tls-certificate", "run.toml", "--tls-key", "run.toml"),
            "Omit --no-keys",
        ),
        (("--no-keys", "--tls-certificate", "none.pem", "--tls-key", "run.toml"), "none.pem: no such file"),
        (("--no-keys", "--set", "train.lr"), "must be KEY=VALUE"),
        (("--no-keys", "--set", "rollout.n_samples_per_prompt=2"), "clients decide this"),
        (("--no-keys", "--port", "0"), "model: is missing"),
    ],
)
def test_what_a_server_does_not_start_with(warm, tmp_path, words, message):
    (tmp_path / "run.toml").write_text('name = "served"\nbackend = "fsdp"\nengine = "local"\n')
    code, _, err = warm.run(["serve", "run.toml", *words], tmp_path)
    assert code
    assert message in err
    assert "Traceback" not in err


def test_values_of_set():
    assert chosen(["train.seed=1", 'name="a b"', "engine.name=local"]) == {
        "train.seed": 1,
        "name": "a b",
        "engine.name": "local",
    }
