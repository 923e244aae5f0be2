"""The contract kit's engine suite, every property that vLLM can have, on one server that is given its first weights again each
time. slime-sglang's tests run the same suite."""

import pytest

from slime_plugin_kit.attached_case import AttachedCase, properties_of
from slime_vllm.plugin import Vllm

HAS, LACKS = properties_of(Vllm)


@pytest.mark.vllm
@pytest.mark.parametrize("name", HAS)
def test_property(name, served, model):
    def build():
        served.renew()
        return served.attach()

    AttachedCase(Vllm, build).keep(name, model)


def test_what_it_lacks():
    """Equal bits with any other requests beside (a batch of other rows has other sums), and a checksum (weights are in the
    order of vLLM's kernels)."""
    assert LACKS == [
        "the_seed_decides_the_tokens",
        "company_changes_no_draw",
        "its_checksum_is_that_of_the_weights",
    ]
