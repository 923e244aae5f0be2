"""The engine's number of threads is its own."""

import threading

import pytest
import torch

from slime_local.threads import choose_threads, use_threads


def threads_of_another():
    found = []
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join()
    return found[0]


def test_other_threads_keep_theirs():
    found = []

    def engine():
        use_threads(1)
        found.extend([torch.get_num_threads(), threads_of_another()])

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        thread = threading.Thread(target=engine)
        thread.start()
        thread.join()
        assert found == [1, 3]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("asked", "parameters", "expected"), [(0, 10**6, 1), (0, 10**9, 3), (2, 10**6, 2)])
def test_small_models_take_one(asked, parameters, expected):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert choose_threads(asked, parameters) == expected
    finally:
        torch.set_num_threads(before)
