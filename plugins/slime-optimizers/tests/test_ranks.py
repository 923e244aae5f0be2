"""Two ranks against one, resumed runs, and sleep, for each optimizer."""

import pytest
import torch


@pytest.mark.bits
def test_shards_step_as_whole_tensors(name, ranks, stepped, different):
    alone = stepped(name)
    alone.step(0, 3)
    for rank in ranks(f"{name}_shards"):
        assert not different(rank["values"], alone.values())
        assert not different(rank["states"], alone.states())


def test_two_ranks_train_as_one(name, ranks, begin):
    """Gradients of two ranks are sums in another order, so they are not equal to the bit; an update rounds to eight bits."""
    alone = begin(name)
    start = alone.weights()
    alone.train(4)
    expected = alone.weights()
    found = ranks(f"{name}_backend")[0]["after 4"]
    moved = torch.stack([(expected[of] - start[of]).norm() for of in expected]).norm()
    apart = torch.stack([(expected[of] - found[of]).norm() for of in expected]).norm()
    assert moved > 0.1
    assert apart < 0.01 * moved


@pytest.mark.bits
def test_two_ranks_resume_to_the_bit(name, ranks, different):
    saved = ranks(f"{name}_backend")[0]
    assert different(saved["after 2"], saved["after 4"])
    assert not different(saved["resumed"], saved["after 4"])


@pytest.mark.bits
def test_one_rank_resumes_to_the_bit(name, begin, different, tmp_path):
    straight = begin(name)
    straight.train(2)
    straight.backend.save(tmp_path)
    straight.backend.sleep()
    straight.backend.wake_up()
    straight.train(2)
    resumed = begin(name)
    resumed.train(1)
    resumed.backend.load(tmp_path)
    resumed.train(2)
    assert not different(resumed.weights(), straight.weights())
