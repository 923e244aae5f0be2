"""How SGLang logs."""

from __future__ import annotations

import re
from typing import Final

from slime_serving.server_process import LogFormat

SGLANG_LOG: Final = LogFormat(stamp=re.compile(r"^\[[^\]]*\] "), fatal="hit an exception: ")
