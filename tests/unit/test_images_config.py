"""A run with images needs a backend and an engine that take them, and what serves a teacher has none."""

from __future__ import annotations

import numpy as np
import pytest

from slime_core.contracts.engine import Capability, EngineInfo
from slime_core.errors import ConfigError, EngineError
from slime_core.rollout.episode import images_of
from slime_core.types import Image, Prompt
from slime_core.workers.engines import require_images

IMAGES = ("--multimodal-keys", '{"image": "images"}')


def test_parts_that_take_no_images_are_refused(bound):
    bound()
    with pytest.raises(ConfigError) as caught:
        bound(*IMAGES)
    asked = "data.multimodal_keys = {'image': 'images'}: "
    assert sorted(caught.value.problems) == [
        asked + 'backend "fake" does not train models with images. Say --backend with one that does.',
        asked + 'engine "fake" takes no images. Say --engine with one that does.',
    ]
    with pytest.raises(ConfigError, match="multimodal_keys"):
        bound("--multimodal-keys", '{"sound": "clips"}')


def test_an_engine_that_takes_images_alone_is_refused_with_videos(bound, monkeypatch):
    run = bound()
    drivers = {part.driver for part in (run.engine, run.backend)}
    for driver in drivers:
        monkeypatch.setattr(driver, "takes_images", True, raising=False)
        monkeypatch.setattr(driver, "may_offer", frozenset({Capability.IMAGES}), raising=False)
    with pytest.raises(ConfigError) as caught:
        bound("--multimodal-keys", '{"video": "clips"}')
    assert "takes images, and no videos" in str(caught.value)


def test_an_engine_that_takes_none_with_this_model_is_told():
    class Spec:
        class setup:
            index, model_path = 3, "models/text"

    require_images([Spec], [EngineInfo(capabilities=frozenset({Capability.IMAGES}))])
    with pytest.raises(EngineError, match="engine 3 takes no images with the model models/text"):
        require_images([Spec], [EngineInfo(capabilities=frozenset())])


def test_requests_that_begin_with_the_prompt_have_its_images():
    prompt = Prompt(group_index=0, text="", token_ids=np.array([1, 2], np.int32), images=(Image(data=b"a"),))
    assert images_of(prompt, np.array([1, 2, 7], np.int32)) == prompt.images
    assert images_of(prompt, np.array([2, 1, 7], np.int32)) == ()
    assert images_of(prompt, np.array([1], np.int32)) == ()
