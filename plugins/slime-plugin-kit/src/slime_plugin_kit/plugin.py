"""What pytest loads by the entry point `pytest11`: three options, and nothing else until one is given."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("slime_plugin_kit.suites")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("slime", "slime's contract kit")
    group.addoption(
        "--every-test-runs",
        metavar="MARKER",
        help="A test with this marker that is skipped, expected to fail or deselected fails the session.",
    )
    group.addoption(
        "--slime-plugin",
        action="append",
        default=[],
        metavar="DISTRIBUTION",
        help="Prove the contracts of everything that this installed distribution registers, or of a plugin file "
        "(./my_reward.py). Without paths, nothing else is run.",
    )
    group.addoption(
        "--slime-time-limit",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="Time limit of each test of the kit (default: 300).",
    )


def pytest_configure(config: pytest.Config) -> None:
    if marker := config.getoption("every_test_runs"):
        from slime_plugin_kit.every_test import EveryTestRuns

        config.pluginmanager.register(EveryTestRuns(marker), "slime-every-test-runs")
    asked = config.getoption("slime_plugin")
    if asked:
        from slime_core.errors import SlimeError
        from slime_plugin_kit.kit import ContractKit

        try:
            kit = ContractKit.of(asked, config)
        except SlimeError as error:
            raise pytest.UsageError(str(error)) from error
        config.pluginmanager.register(kit, "slime-contract-kit")
