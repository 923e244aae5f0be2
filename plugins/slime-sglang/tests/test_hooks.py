"""What a server says of its hooks is what SGLang's registry has really put in."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from slime_sglang.server import hooks
from slime_sglang.server.loading import CAN_VERIFY

pytestmark = pytest.mark.sglang


@pytest.fixture
def updater(monkeypatch):
    """A class for SGLang's registry to hook in the place of its WeightUpdater."""
    module = ModuleType("pretended")
    methods = {name: lambda self, *args: "loaded unchecked" for name in hooks.LOADING}
    module.Updater = type("Updater", (), methods)
    monkeypatch.setitem(sys.modules, "pretended", module)
    monkeypatch.setattr(hooks, "UPDATER", "pretended.Updater")
    return module.Updater


def apply():
    # A module on its own: SGLang is not imported beside others' tests.
    (folder,) = importlib.util.find_spec("sglang").submodule_search_locations
    spec = importlib.util.spec_from_file_location("registry", Path(folder, "srt/plugins/hook_registry.py"))
    registry = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(registry)
    HookRegistry, HookType = registry.HookRegistry, registry.HookType
    for name, hook in hooks.LOADING.items():
        HookRegistry.register(f"{hooks.UPDATER}.{name}", hook, HookType.AROUND)
    # Somebody else's, around ours or inside.
    HookRegistry.register(f"{hooks.UPDATER}.update_weights_from_disk", lambda *args: None, HookType.BEFORE)
    HookRegistry.apply_hooks()


def test_a_server_verifies_if_its_loading_is_hooked(updater):
    with pytest.raises(NotImplementedError, match=r"no pretended\.Updater\.update_weights_from_disk"):
        hooks.check_weights(None, None, CAN_VERIFY)
    apply()
    assert hooks.check_weights(None, None, CAN_VERIFY) is None


def test_a_hook_that_could_not_be_put_in_is_missed(updater):
    """SGLang logs it and goes on."""
    del updater.update_weights_from_disk
    apply()
    assert updater.update_weights_from_tensor.__wrapped__
    with pytest.raises(NotImplementedError, match="update_weights_from_disk"):
        hooks.check_weights(None, None, CAN_VERIFY)
