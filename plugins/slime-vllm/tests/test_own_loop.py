"""A session with the real vLLM."""

import pytest
from addition import CHARACTERS

from slime_plugin_kit.own_loop_case import require_own_loop_is_the_run

pytestmark = pytest.mark.vllm


def test_a_loop_of_ones_own_trains_as_slime_run(served, model, tmp_path):
    served.renew()
    overrides = {
        "engine.name": "vllm",
        "engine.external_engine_addrs": [served.address],
        "engine.external_engine_token_file": str(served.token_file),
    }
    prompts = [CHARACTERS[number : number + 4] for number in range(8)]
    require_own_loop_is_the_run(tmp_path, model, prompts, overrides, served.renew)
