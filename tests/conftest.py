"""Processes that `slime` commands are forked from, for all folders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slime_plugin_kit.warm_slime import WarmSlime, warm_slime

IMPORTED = (
    "slime_sources.files",
    "slime_core.cli.main",
    "slime_core.cli.training",
    "slime_viewer.viewing",
    "slime_core.controller.loop",
    "slime_core.controller.run_inputs",
    "slime_core.controller.startup",
    "slime_fsdp.backend",
    "slime_fsdp.plugin",
    "slime_grpo.plugin",
    "slime_local.engine",
    "slime_local.plugin",
    "slime_rm_math.plugin",
    "torch",
    "transformers.models.auto.auto_factory",
    "transformers.models.qwen3.modeling_qwen3",
)


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmSlime]:
    with warm_slime(tmp_path_factory.mktemp("warm"), IMPORTED) as warm:
        yield warm


@pytest.fixture(scope="session")
def warm_pair(warm: WarmSlime, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WarmSlime, WarmSlime]]:
    """Forks of one have another hash seed than forks of the other, like two processes that are started."""
    with warm_slime(tmp_path_factory.mktemp("other"), IMPORTED) as other:
        yield warm, other
