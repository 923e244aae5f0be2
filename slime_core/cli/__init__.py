"""The `slime` command: its frame, and the commands of the kernel."""

import time
from typing import Final

BEGAN: Final = time.perf_counter()
"""When the program began, but for the start of Python."""
