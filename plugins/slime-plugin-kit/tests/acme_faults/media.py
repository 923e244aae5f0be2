"""Media with one thing wrong."""

from typing import ClassVar

from slime_core.contracts.engine import Capability
from slime_core.contracts.media import MediaDriver


class Sees(MediaDriver):
    """Nothing is wrong with it."""

    needs: ClassVar = Capability.IMAGES
    made: ClassVar = "Sight"

    @classmethod
    def build(cls, config):
        from acme_faults import media_classes

        return getattr(media_classes, cls.made)()


def spoilt(**traits):
    return type("Spoilt", (Sees,), {"__doc__": "Spoilt.", **traits})


NEEDS_A_WORD = spoilt(needs="images")
SHIFTS_PLACES = spoilt(made="ShiftsPlaces")
LEAVES_ONE_OUT = spoilt(made="LeavesOneOut")
GREETS = spoilt(made="Greets")
RENAMES = spoilt(made="Renames")
RAISES_AS_IT_COMES = spoilt(made="RaisesAsItComes")
