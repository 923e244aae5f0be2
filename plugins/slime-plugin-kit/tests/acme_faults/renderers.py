"""Renderers with one thing wrong."""

import functools
from dataclasses import asdict
from typing import ClassVar

from slime_core.contracts.renderer import RendererDriver


class Renders(RendererDriver):
    """Nothing is wrong with it."""

    made: ClassVar = "Plain"

    @classmethod
    def build(cls, config):
        return functools.partial(renderer_of, cls.made)


def renderer_of(name, tokenizer, settings, media):
    from acme_faults import renderer_classes

    return getattr(renderer_classes, name)(tokenizer, media=media, **asdict(settings))


def spoilt(made):
    return type("Spoilt", (Renders,), {"__doc__": "Spoilt.", "made": made})


WIDE_IDS = spoilt("WideIds")
DROPS_LABELS = spoilt("DropsLabels")
COUNTS_ROWS = spoilt("CountsRows")
FILLS_IN = spoilt("FillsIn")
FILLS_THE_CONTEXT = spoilt("FillsTheContext")
