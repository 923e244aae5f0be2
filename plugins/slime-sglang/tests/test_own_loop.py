"""A session with the real SGLang."""

import pytest

from slime_plugin_kit.own_loop_case import require_own_loop_is_the_run

pytestmark = pytest.mark.sglang


def test_a_loop_of_ones_own_trains_as_slime_run(served, tiny, tmp_path):
    served.renew()
    overrides = {"engine.name": "sglang", **{f"engine.{name}": value for name, value in served.options.items()}}
    overrides["engine.external_engine_addrs"] = list(served.options["external_engine_addrs"])
    require_own_loop_is_the_run(tmp_path, tiny, [f"1+{number}=" for number in range(8)], overrides, served.renew)
