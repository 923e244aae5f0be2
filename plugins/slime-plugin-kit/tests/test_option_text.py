"""Options as text for people."""

from typing import Literal

from pydantic import Field

from slime_core.contracts.driver import DriverConfig
from slime_plugin_kit.option_text import describe


class Options(DriverConfig):
    """Options."""

    eps_clip: float = Field(0.2, gt=0, lt=1)
    """Half the width of the clip."""
    eps_clip_high: float | None = None
    """Upper side."""
    steps: int
    """How many."""
    mode: Literal["fast", "slow"] = "fast"
    """Which way."""


def test_describe_gives_type_bounds_default_and_meaning():
    described = {o.name: (o.type, o.default, o.doc) for o in describe(Options)}
    assert described["eps_clip"] == ("float, gt=0, lt=1", "0.2", "Half the width of the clip")
    assert described["steps"] == ("int", "required", "How many")
    assert described["mode"] == ("Literal['fast', 'slow']", '"fast"', "Which way")
    assert described["eps_clip_high"][:2] == ("float | None", "None")
