"""Names of the timeline's lanes."""

from typing import Final

ENGINES: Final = "engines"
TRAINER: Final = "trainer"
"""With a colon and a name: one of several trained roles."""
DEVICES: Final = "devices"
"""Devices that trainer and engines share: both together."""
