"""Process groups beside the default one."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from slime_training.process_group import CheckpointGroups, group_for_saving


@pytest.fixture
def only_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ranks_wait_for_one_that_still_writes_for_longer_than_gloo_would(only_rank):
    gloos, saving = (
        group._get_backend(torch.device("cpu")).options._timeout for group in (dist.group.WORLD, group_for_saving())
    )
    assert gloos <= timedelta(minutes=30) < timedelta(hours=12) <= saving


def test_checkpoint_groups_are_made_when_they_are_needed_and_kept():
    made = []
    groups = CheckpointGroups(lambda: made.append(object()) or made[-1])
    assert not made
    assert groups.staging is groups.staging is made[0]
    assert groups.saving is groups.saving is made[1]
    assert len(made) == 2
