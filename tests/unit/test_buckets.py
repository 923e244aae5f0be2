"""Exported tensors in buckets: nothing is lost, nothing is overwritten, and the last one is marked."""

import numpy as np
import pytest
import torch
import xxhash

from slime_core.workers.buckets import buckets_of


def layers():
    """Uneven; one tensor is empty, one alone is larger than a bucket, one is a view that is not contiguous."""
    torch.manual_seed(0)
    yield {"embed": torch.randn(7, 4), "empty": torch.empty(0, 3)}
    yield {"up": torch.randn(40, 5).to(torch.bfloat16), "norm": torch.randn(3, dtype=torch.float64)}
    yield {"down": torch.randn(6, 5).T}


def raw(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("size", [1, 100, 150, 1 << 20])
def test_buckets_hold_every_tensor_once(size):
    tensors = {name: tensor for layer in layers() for name, tensor in layer.items()}
    buckets = list(buckets_of(layers(), version=4, bucket_bytes=size))
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    assert [bucket.last for bucket in buckets] == [False] * (len(buckets) - 1) + [True]
    assert [name for bucket in buckets for name in bucket.names] == list(tensors)
    for bucket in buckets:
        assert bucket.version == 4
        assert bucket.data.dtype == np.uint8
        assert len(bucket.data) <= size or len([name for name in bucket.names if tensors[name].numel()]) == 1
        assert bucket.data.tobytes() == b"".join(raw(tensors[name]) for name in bucket.names)
        assert bucket.checksum == xxhash.xxh3_64(bucket.data.tobytes()).hexdigest()
        assert [f"torch.{dtype}" for dtype in bucket.dtypes] == [str(tensors[name].dtype) for name in bucket.names]
        assert [tuple(tensors[name].shape) for name in bucket.names] == list(bucket.shapes)


def test_a_bucket_is_a_copy_of_its_tensors():
    weight = torch.randn(5)
    (bucket,) = buckets_of([{"weight": weight}], version=0, bucket_bytes=1 << 20)
    before = bucket.data.copy()
    weight += 1
    np.testing.assert_array_equal(bucket.data, before)


def test_ranks_that_only_take_part_give_no_bucket():
    assert list(buckets_of([None, None, None], version=1, bucket_bytes=10)) == [None, None, None]
