"""A run with images needs a backend and an engine that take them; a teacher's engine cannot score images."""

from __future__ import annotations

import numpy as np
import pytest

from slime_core import groups
from slime_core.contracts.engine import Capability, EngineInfo
from slime_core.errors import ConfigError, EngineError, PluginError
from slime_core.registry import Registry, plugin_file
from slime_core.rollout.episode import images_of
from slime_core.types import Image, Prompt
from slime_core.workers.engines import require

IMAGES = ("--multimodal-keys", '{"image": "images"}')


def test_parts_that_take_no_images_are_refused(bound):
    bound()
    with pytest.raises(ConfigError) as caught:
        bound(*IMAGES)
    asked = "data.multimodal_keys = {'image': 'images'}: "
    assert sorted(caught.value.problems) == [
        asked + 'backend "fake" does not train models with images. Pass --backend with one that does.',
        asked + 'engine "fake" takes no images. Pass --engine with one that does.',
    ]


def test_an_unknown_modality_is_reported_with_the_known_ones(bound):
    with pytest.raises(ConfigError) as caught:
        bound("--multimodal-keys", '{"sound": "clips"}')
    (problem,) = caught.value.problems
    assert problem.startswith('data.multimodal_keys = "sound": unknown modality. ')
    assert "image, video (slime-models " in problem


@pytest.mark.parametrize(("modality", "extra"), [("image", "images"), ("video", "video")])
def test_the_error_of_a_modality_that_is_not_installed_names_the_package(monkeypatch, modality, extra):
    monkeypatch.setattr("slime_core.registry.registry.installed_entries", dict)
    with pytest.raises(PluginError, match=rf'pip install "slime-rl\[{extra}\]"'):
        Registry().find(groups.MEDIA, modality, where="data.multimodal_keys")


@pytest.fixture
def able(bound, monkeypatch):
    """Lets backend and engine take images; the engine only these modalities."""

    def make(*offered):
        run = bound()
        monkeypatch.setattr(run.backend.driver, "supports_images", True, raising=False)
        monkeypatch.setattr(run.engine.driver, "optional_capabilities", frozenset(offered), raising=False)
        load = plugin_file.PluginFile.load
        loaded = {file.path: load(file) for file in run.registry.plugin_files}
        # A run file's plugins are loaded anew for each run.
        monkeypatch.setattr(plugin_file.PluginFile, "load", lambda file: loaded.get(file.path) or load(file))
        return bound

    return make


def test_an_engine_that_takes_images_alone_is_refused_with_videos(able):
    bound = able(Capability.IMAGES)
    with pytest.raises(ConfigError) as caught:
        bound("--multimodal-keys", '{"video": "clips", "image": "images"}')
    asked = "data.multimodal_keys = {'video': 'clips', 'image': 'images'}: "
    assert caught.value.problems == [asked + 'engine "fake" takes no videos. Pass --engine with one that does.']
    assert [part.entry.name for part in bound(*IMAGES).media] == ["image"]


SOUND = """
from slime_core.contracts.engine import Capability
from slime_core.contracts.media import MediaDriver
from slime_core.plugin import driver


@driver("slime.media", "sound")
class Sound(MediaDriver):
    needs = Capability.IMAGES

    @classmethod
    def build(cls, config):
        raise AssertionError("nothing is built while binding")
"""


def test_modalities_of_two_distributions_do_not_share_prompts(able, tmp_path):
    (tmp_path / "sound.py").write_text(SOUND)
    bound = able(Capability.IMAGES)
    flags = ("--plugin", str(tmp_path / "sound.py"))
    run = bound("--multimodal-keys", '{"sound": "clips"}', *flags)
    assert [part.entry.name for part in run.media] == ["sound"]
    assert set(run.media) <= set(run.parts)
    with pytest.raises(ConfigError, match=r"slime-models and sound\.py do not share prompts"):
        bound("--multimodal-keys", '{"sound": "clips", "image": "images"}', *flags)


def test_an_engine_that_takes_no_images_with_this_model_is_reported(able):
    class Spec:
        class setup:
            index, model_path = 3, "models/text"
            offload = routed_experts = reward_model = False

    run = able(Capability.IMAGES, Capability.VIDEOS)("--multimodal-keys", '{"image": "images", "video": "clips"}')
    require([Spec], [EngineInfo(capabilities=frozenset({Capability.IMAGES, Capability.VIDEOS}))], media=run.media)
    with pytest.raises(EngineError, match="engine 3 takes no videos with the model models/text"):
        require([Spec], [EngineInfo(capabilities=frozenset({Capability.IMAGES}))], media=run.media)
    with pytest.raises(EngineError, match="engine 3 takes no images and no videos with the model models/text"):
        require([Spec], [EngineInfo(capabilities=frozenset())], media=run.media)


def test_requests_that_begin_with_the_prompt_have_its_images():
    prompt = Prompt(group_index=0, text="", token_ids=np.array([1, 2], np.int32), images=(Image(data=b"a"),))
    assert images_of(prompt, np.array([1, 2, 7], np.int32)) == prompt.images
    assert images_of(prompt, np.array([2, 1, 7], np.int32)) == ()
    assert images_of(prompt, np.array([1], np.int32)) == ()
