"""What verl 0.9.1 needs beside newer packages; verl imports it (VERL_USE_EXTERNAL_MODULES) in each of its processes.

trl: verl takes AutoModelForCausalLMWithValueHead from any trl that is installed, to patch it. trl 1.16 has none, so that every
actor would end with an ImportError. verl is told that there is no trl: value heads are of PPO's critic, which GRPO has not.
"""

from __future__ import annotations

import verl.utils.import_utils


def no_trl() -> bool:
    return False


verl.utils.import_utils.is_trl_available = no_trl
