"""Batches and their columns come back to the bit."""

from dataclasses import fields, replace

import numpy as np
import pytest

from slime_core.data.train_data import read_train_data, train_data_file, write_train_data
from slime_core.errors import DataError
from slime_core.types.batch import TokenColumns


def same(one, other):
    for field in fields(one):
        before, after = getattr(one, field.name), getattr(other, field.name)
        assert (before is None) == (after is None), field.name
        if before is not None:
            assert after.dtype == before.dtype, field.name
            assert after.tobytes() == before.tobytes(), field.name


@pytest.mark.parametrize("with_spans", [False, True])
@pytest.mark.parametrize("most", [2**31 - 1, 3], ids=["", "more than 32 bits count"])
def test_a_round_trip(make_batch, tmp_path, monkeypatch, with_spans, most):
    monkeypatch.setattr("slime_core.data.train_data.MOST_IN_LISTS", most)
    batch = make_batch([(2, 3), (1, 0), (4, 2)], reward=[1.0, np.nan, -0.0])
    if with_spans:
        batch = replace(batch, token_reward=np.array([0, 0.5, 0, -1, 0], np.float32))
    columns = TokenColumns(
        advantages=np.array([1, np.nan, -0.0, 3, np.inf], np.float32),
        loss_weight=np.arange(5, dtype=np.float32),
    )
    path = train_data_file(tmp_path, 7)
    assert path.name == "step_000007.parquet"
    write_train_data(path, batch, columns)
    read, read_columns = read_train_data(path)
    same(batch, read)
    same(columns, read_columns)


def test_missing_and_other_files_are_errors(tmp_path, make_batch):
    with pytest.raises(DataError, match=r"no such train data; .* holds 0 steps.*--save-debug-train-data"):
        read_train_data(train_data_file(tmp_path, 0))
    train_data_file(tmp_path, 0).write_text("no parquet")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        read_train_data(train_data_file(tmp_path, 0))
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"index": [1]}), train_data_file(tmp_path, 1))
    with pytest.raises(DataError, match="not train data: it lacks group_index"):
        read_train_data(train_data_file(tmp_path, 1))
