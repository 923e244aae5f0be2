"""SGLang unpickles the bucket's tensors; buckets that do not fit are refused before anything is sent."""

import base64
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from slime_core.errors import EngineError
from slime_plugin_kit.tiny_model import buckets_of, load_plain, named_weights
from slime_sglang.buckets import SglangBuckets, payload

ALLOWED = ("builtins", "functools", "types", "torch", "collections")
"""Modules on SGLang's list of what may be unpickled."""


class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        assert module.partition(".")[0] in ALLOWED, f"{module}.{name}"
        return super().find_class(module, name)


@pytest.mark.parametrize("shared", [True, False])
def test_payload(shared, tmp_path):
    weights = {
        "a_odd": torch.arange(3, dtype=torch.bfloat16),
        "b_after": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "c_empty": torch.zeros(0, 4),
    }
    (bucket,) = buckets_of(weights, 3, 1)
    with payload(bucket, shared=shared) as text:
        file = tmp_path / "payload"
        file.write_bytes(base64.b64decode(text))
        with file.open("rb") as stream:
            loaded = Unpickler(stream).load()
        # SGLang's way to rebuild the tensors.
        for meta in loaded["metadata"]:
            flat = loaded["flattened_tensor"][meta.start_idx : meta.end_idx]
            tensor = flat.view(meta.dtype).reshape(meta.shape)
            assert torch.equal(tensor, weights[meta.name])
            assert tensor.dtype == weights[meta.name].dtype
        assert (len(text) < 2000) or not shared


@pytest.fixture(scope="module")
def good(tiny):
    return buckets_of(named_weights(load_plain(tiny, torch.float32)), 1, 3)


def refused(order, bucket):
    with pytest.raises(EngineError) as caught:
        order.check(bucket)
    return str(caught.value)


def test_order(good, tiny):
    order = SglangBuckets(tiny, "engine 0")
    assert "out of order" in refused(order, good[1])
    order.check(good[0])
    order.loaded(good[0])
    assert order.incomplete
    assert "out of order: expected index 1 of version 1" in refused(order, good[2])
    # Then it starts again.
    for bucket in good:
        order.check(bucket)
        order.loaded(bucket)
    assert not order.incomplete


def test_buckets_that_do_not_fit(good, tiny):
    order = SglangBuckets(tiny, "engine 0")
    first = good[0]
    flipped = first.data.copy()
    flipped[7] ^= 1
    assert "damaged" in refused(order, replace(first, data=flipped))
    renamed = [first.names[0] + "s", *first.names[1:]]
    assert f"close to {renamed[0]}: {first.names[0]}" in refused(order, replace(first, names=renamed))
    shapes = [tuple(reversed((*first.shapes[0], 1))), *first.shapes[1:]]
    assert "has shape" in refused(order, replace(first, shapes=shapes))
    assert "tensors of the model are missing" in refused(order, replace(first, last=True))
    short = first.data[:-4]
    import xxhash

    cut = replace(first, data=short, checksum=xxhash.xxh3_64_hexdigest(np.ascontiguousarray(short).data))
    assert "bytes, it holds" in refused(order, cut)


def test_a_folder_without_safetensors_has_fewer_checks(good):
    order = SglangBuckets(Path("/nonexistent"), "engine 0")
    order.check(good[0])


def test_tensors_that_sglang_would_lose_are_refused(tmp_path):
    """Projections of latent attention; a model without the first of the two has only the second."""
    both = {f"layers.0.{name}.weight": torch.zeros(2) for name in ("q_a_proj", "kv_a_proj_with_mqa")}
    q, kv = both
    (together,) = buckets_of(both, 1, 1)
    SglangBuckets(tmp_path, "engine 0").check(together)
    (alone,) = buckets_of({kv: both[kv]}, 1, 1)
    SglangBuckets(tmp_path, "engine 0").check(alone)
    (parted,) = buckets_of({q: both[q]}, 1, 1)
    with pytest.raises(EngineError, match=rf"bucket 0 .*{q} is without {kv}.*sync\.update_weight_buffer_size"):
        SglangBuckets(tmp_path, "engine 0").check(parted)
