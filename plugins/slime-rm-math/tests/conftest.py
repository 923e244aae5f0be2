from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SampleGroup

MakeGroup = Callable[..., SampleGroup]


@pytest.fixture(scope="session")
def make_group() -> MakeGroup:
    def make(label: Any, *responses: str) -> SampleGroup:
        prompt = Prompt(
            group_index=7, text="q", token_ids=np.array([1], np.int32), label=label, origin="train.jsonl:12"
        )
        samples = tuple(
            Sample(
                index=index,
                group_index=7,
                rollout_id=index,
                prompt=prompt,
                tokens=np.array([1, 2], np.int32),
                prompt_length=1,
                loss_mask=np.ones(1, np.uint8),
                rollout_log_probs=np.zeros(1, np.float32),
                response=response,
            )
            for index, response in enumerate(responses)
        )
        return SampleGroup(prompt=prompt, samples=samples)

    return make
