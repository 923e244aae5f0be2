"""Generators, played with an engine that speaks."""

import asyncio
import sys
from pathlib import Path

import pytest

# The suite is collected with importlib, which does not put its folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

from agents_speaker import Speaker, episode_with


@pytest.fixture
def speak():
    """`speak(reply, generator, **episode)` gives the samples and the engine."""

    def play(reply, generator, **options):
        return asyncio.run(scene(reply, generator, **options))

    async def scene(reply, generator, *, fails=None, **options):
        engine = Speaker(reply, failure=fails)
        episode = episode_with(engine, **options)
        try:
            return await generator.generate(episode), engine
        finally:
            await generator.close()

    return play
