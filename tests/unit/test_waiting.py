"""Requests wait in order of arrival, whatever engines they require, at the same cost."""

from collections import deque

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.rollout.waiting import WaitingRequests
from slime_core.types.completion import GenerateRequest, SamplingParams

EVERY = (0, 1)


def request(name, engines=()):
    sampling = SamplingParams(max_new_tokens=1)
    return GenerateRequest(
        request_id=name, token_ids=np.array([1], np.int32), sampling=sampling, seed=0, engines=engines
    )


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from([(), (0,), (1,), EVERY])),
        st.tuples(st.just("first"), st.lists(st.sampled_from([(), (0,), (1,)]), max_size=3)),
        st.tuples(st.just("pop"), st.sets(st.sampled_from([(), (0,), (1,)]))),
        st.tuples(st.just("take"), st.sets(st.integers(0, 20))),
    )
)


@given(STEPS)
@settings(deadline=None, derandomize=True)
def test_it_is_one_queue_from_which_some_are_passed_over(steps):
    """Compared with a plain list."""
    waiting, plain, made = WaitingRequests(EVERY), deque(), 0

    def engines_of(one):
        return () if one.engines is EVERY else one.engines

    for kind, argument in steps:
        if kind == "append":
            one = request(str(made), argument)
            waiting.append(one)
            plain.append(one)
            made += 1
        elif kind == "first":
            some = [request(str(made + number), engines) for number, engines in enumerate(argument)]
            waiting.put_first(some)
            plain.extendleft(reversed(some))
            made += len(some)
        elif kind == "pop":
            expected = next((one for one in plain if engines_of(one) not in argument), None)
            assert waiting.pop(argument) is expected
            if expected is not None:
                plain.remove(expected)
        else:
            names = {str(number) for number in argument}
            expected = [one for one in plain if one.request_id in names]
            assert waiting.take(names) == expected
            plain = deque(one for one in plain if one.request_id not in names)
        assert bool(waiting) == bool(plain)
    while plain:
        assert waiting.pop() is plain.popleft()
    assert waiting.pop() is None
