"""What verl 0.9.1 needs beside newer packages; verl imports it (VERL_USE_EXTERNAL_MODULES) in each of its processes.

trl: verl takes AutoModelForCausalLMWithValueHead from any trl that is installed, to patch it. trl 1.16 has none, so that every
actor would end with an ImportError. For verl there is no trl then: value heads are of PPO's critic,
which GRPO has not.

megatron: each of verl's processes imports it where it is installed, which takes seconds. The trainer here is FSDP2.
"""

from __future__ import annotations

import sys

import verl.utils.import_utils


def no_trl() -> bool:
    return False


verl.utils.import_utils.is_trl_available = no_trl

# Importing it raises ImportError, as if it were not installed.
sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]
