"""The order of test files: a long one that begins last leaves a core idle."""

from __future__ import annotations

from pathlib import Path

import pytest

LONGEST_FIRST = (
    "tests/examples/test_arithmetic_task.py",
    "tests/examples/test_agents.py",
    "tests/examples/test_vision.py",
    "tests/examples/test_search_r1.py",
    "tests/integration/test_distill.py",
    "tests/examples/test_buffer_service.py",
    "tests/integration/test_killed_in_phases.py",
    "plugins/slime-plugin-kit/tests/test_planted_faults.py",
    "tests/integration/test_critic.py",
    "tests/integration/test_rollout_workers.py",
    "plugins/slime-plugin-kit/tests/test_shipped_plugins.py",
    "tests/integration/test_ray_launcher.py",
    "tests/integration/test_session.py",
    "tests/integration/test_session_adapters.py",
    "tests/integration/test_whole_run.py",
    "plugins/slime-plugin-kit/tests/test_kit.py",
    "tests/integration/test_older_wheel.py",
    "tests/integration/test_session_states.py",
    "tests/integration/test_bad_input.py",
    "tests/integration/test_middlewares.py",
    "plugins/slime-fsdp/tests/test_two_ranks.py",
    "plugins/slime-megatron/tests/test_layouts.py",
    "plugins/slime-megatron/tests/test_checkpoints.py",
    "plugins/slime-megatron/tests/test_prediction.py",
    "plugins/slime-megatron/tests/test_routing_replay.py",
    "plugins/slime-megatron/tests/test_conversion.py",
    "plugins/slime-megatron/tests/test_whole_run.py",
    "plugins/slime-megatron/tests/test_contract.py",
    "plugins/slime-sglang/tests/test_whole_runs.py",
    "plugins/slime-sglang/tests/test_reward_model.py",
    "plugins/slime-sglang/tests/test_servers.py",
    "plugins/slime-sglang/tests/test_two_machines.py",
    "plugins/slime-sglang/tests/test_image_data.py",
)
PLACE = {Path(__file__).parent / file: place for place, file in enumerate(LONGEST_FIRST)}


def pytest_configure() -> None:
    gone = [str(file) for file in PLACE if not file.exists()]
    if gone:
        raise pytest.UsageError(f"{__file__}: there is no {', '.join(gone)}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: PLACE.get(item.path, len(PLACE)))
