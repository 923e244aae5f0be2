"""In which order buckets are taken, and what starts a version again."""

from dataclasses import replace

import pytest
import torch

from slime_core.errors import EngineError
from slime_plugin_kit.tiny_model import buckets_of
from slime_training.bucket_order import BucketOrder, missing_error, unexpected_problem
from slime_training.listed_names import listed

WEIGHTS = {name: torch.full((2,), float(number)) for number, name in enumerate("abc")}


def take(order, buckets):
    for bucket in buckets:
        order.expect(bucket)
        order.incomplete = True
        order.loaded(bucket)


def test_versions_follow_one_another():
    order = BucketOrder("engine 3")
    for version in (1, 2):
        first, *others = buckets_of(WEIGHTS, version, 3)
        assert order.expect(first) == f"engine 3: bucket 0 of version {version}"
        order.loaded(first)
        assert order.incomplete
        assert order.arrived == {"a"}
        assert order.arrived_with(others[0]) == {"a", "b"}
        take(order, others)
        assert not order.incomplete
        assert order.arrived == {"a", "b", "c"}


def test_after_what_was_not_loaded_a_version_starts_again():
    order = BucketOrder("engine 0")
    first, second, third = buckets_of(WEIGHTS, 1, 3)
    take(order, [first])
    with pytest.raises(
        EngineError, match=r"bucket 2 of version 1 is out of order: expected index 1 of version 1, or 0 to"
    ):
        order.expect(third)
    with pytest.raises(EngineError, match="expected index 0 to start again"):
        order.expect(second)
    order.expect(first)
    with pytest.raises(EngineError, match="expected index 0 to start again"):
        order.expect(second)
    assert order.incomplete
    take(order, [first, second, third])
    assert not order.incomplete


def test_damaged_bytes():
    order = BucketOrder("engine 0")
    (whole,) = buckets_of(WEIGHTS, 1, 1)
    flipped = whole.data.copy()
    flipped[7] ^= 1
    with pytest.raises(EngineError, match=f"damaged: checksum {whole.checksum} was sent, its bytes have"):
        order.expect(replace(whole, data=flipped))


def test_names_in_errors():
    assert listed(list("abcdefgh")) == "a, b, c, d, e, f, g, h"
    assert listed(list("abcdefghij")) == "a, b, c, d, e, f, g, h and 2 more"
    assert unexpected_problem(["wieght"], {"weight"}) == "unexpected names wieght (close to wieght: weight)"
    assert "bucket 1 is the last, but tensors of the model are missing: a." in str(missing_error("bucket 1", ["a"]))
