"""The contract kit's transport suite, every property of it. `pytest --slime-plugin slime-transports` has them too."""

from types import SimpleNamespace

import pytest

from slime_plugin_kit.rollout_kinds import TRANSPORTS
from slime_plugin_kit.suites import transports
from slime_transports.plugin import Adapter, Delta, Disk, Distributed, Ipc


class TransportCase:
    """The parts of a case that the suite requires."""

    def __init__(self, driver, **options):
        self.driver = driver
        self.config = driver.Config(**options)
        self.subject = SimpleNamespace(examples=driver.examples(None))

    def build(self):
        return self.driver.build(self.config)


@pytest.mark.parametrize("options", [{}, {"update_weight_buffer_size": 64}], ids=["one bucket", "many"])
@pytest.mark.parametrize("driver", [Ipc, Distributed, Disk, Delta, Adapter])
@pytest.mark.parametrize("name", [prop.name for prop in TRANSPORTS.properties])
def test_property(name, driver, options):
    getattr(transports, f"test_{name}")(TransportCase(driver, **options))
