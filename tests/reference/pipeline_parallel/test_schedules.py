import dataclasses
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.pipeline_parallel.actions import Action, Kind, Placement, Schedule
from reference.pipeline_parallel.dual_pipe_v import dual_pipe_v
from reference.pipeline_parallel.gpipe import gpipe, naive
from reference.pipeline_parallel.interleaved import interleaved_1f1b
from reference.pipeline_parallel.one_forward_one_backward import one_forward_one_backward
from reference.pipeline_parallel.validate import live_activations, timeline, validate
from reference.pipeline_parallel.zero_bubble import zero_bubble

RANKS = st.integers(1, 16)
MICROBATCHES = st.integers(1, 64)


def bubble(schedule: Schedule) -> Fraction:
    return Fraction(timeline(schedule).bubble).limit_denominator(10_000)


@settings(max_examples=40)
@given(RANKS, MICROBATCHES)
def test_naive_leaves_all_ranks_but_one_idle(p, m):
    schedule = naive(p, m)
    validate(schedule)
    assert bubble(schedule) == Fraction(p - 1, p)
    assert set(live_activations(schedule)) == {1}


@settings(max_examples=40)
@given(RANKS, MICROBATCHES)
def test_gpipe_has_its_bubble_and_keeps_every_microbatch(p, m):
    schedule = gpipe(p, m)
    validate(schedule)
    assert bubble(schedule) == Fraction(p - 1, m + p - 1)
    assert live_activations(schedule) == (m,) * p


@settings(max_examples=40)
@given(RANKS, MICROBATCHES)
def test_1f1b_has_gpipes_bubble_and_keeps_p_minus_rank_microbatches(p, m):
    schedule = one_forward_one_backward(p, m)
    validate(schedule)
    assert bubble(schedule) == Fraction(p - 1, m + p - 1)
    assert live_activations(schedule) == tuple(min(m, p - rank) for rank in range(p))


@settings(max_examples=40)
@given(RANKS, st.integers(1, 4), st.integers(1, 4))
def test_interleaving_divides_the_bubble_by_the_chunks(p, groups, v):
    m = p * groups
    schedule = interleaved_1f1b(p, m, v)
    validate(schedule)
    assert bubble(schedule) == Fraction(p - 1, v * m + p - 1)
    expected = tuple(min(v * m, 2 * (p - rank - 1) + (v - 1) * p + 1) for rank in range(p))
    assert live_activations(schedule) == expected


@settings(max_examples=40)
@given(RANKS, MICROBATCHES)
def test_zero_bubble_keeps_a_third_of_the_bubble_at_1f1bs_memory(p, m):
    schedule = zero_bubble(p, m)
    validate(schedule)
    assert max(live_activations(schedule)) <= min(m, p)
    if m >= p:
        assert timeline(schedule).makespan == 3 * m + (p - 1)


@settings(max_examples=40)
@given(RANKS, MICROBATCHES)
def test_dual_pipe_v_has_its_bubble_wherever_it_is_defined(p, m):
    if m < 2 * p:
        with pytest.raises(ValueError, match=f"at least {2 * p} microbatches, got {m}"):
            dual_pipe_v(p, m)
        return
    schedule = dual_pipe_v(p, m)
    validate(schedule)
    assert timeline(schedule).makespan == 6 * m + (p - 1)
    assert max(live_activations(schedule)) <= 2 * p + 1


def test_bubbles_at_four_ranks_and_eight_microbatches_are_the_published_ones():
    assert bubble(gpipe(4, 8)) == Fraction(3, 11)
    assert bubble(one_forward_one_backward(4, 8)) == Fraction(3, 11)
    assert bubble(interleaved_1f1b(4, 8, 2)) == Fraction(3, 19)
    assert bubble(zero_bubble(4, 8)) == Fraction(3, 27)


def test_interleaving_refuses_microbatches_that_do_not_divide_by_the_ranks_and_names_both():
    with pytest.raises(ValueError, match=r"groups of 4.* 10 do not"):
        interleaved_1f1b(4, 10, 2)


@pytest.mark.parametrize("make", [naive, gpipe, one_forward_one_backward, zero_bubble, dual_pipe_v])
def test_no_ranks_or_no_microbatches_are_refused(make):
    with pytest.raises(ValueError, match="at least 1"):
        make(0, 4)
    with pytest.raises(ValueError, match="at least 1"):
        make(4, 0)


@settings(max_examples=40)
@given(st.integers(2, 6), st.integers(2, 12), st.randoms(use_true_random=False))
def test_validator_notices_a_missing_a_double_and_a_misplaced_action(p, m, chance: random.Random):
    good = one_forward_one_backward(p, m)
    rank = chance.randrange(p)
    place = chance.randrange(len(good.ranks[rank]))
    actions = list(good.ranks[rank])

    def with_rank(changed: list[Action]) -> Schedule:
        return dataclasses.replace(good, ranks=(*good.ranks[:rank], tuple(changed), *good.ranks[rank + 1 :]))

    with pytest.raises(ValueError, match="expected F and B"):
        validate(with_rank(actions[:place] + actions[place + 1 :]))
    with pytest.raises(ValueError, match="2 times"):
        validate(with_rank([*actions, actions[place]]))
    with pytest.raises(ValueError, match="its stage is on"):
        validate(dataclasses.replace(good, ranks=good.ranks[1:] + good.ranks[:1]))


def test_validator_finds_the_deadlock_of_a_backward_before_its_forward():
    forward, backward = (Action(kind, 0, 0) for kind in (Kind.FORWARD, Kind.BACKWARD))
    with pytest.raises(ValueError, match=r"deadlocks: waiting are B0\.0"):
        validate(Schedule("wrong", 1, 1, Placement.LOOP, ((backward, forward),)))


def test_1f1b_without_its_warm_up_forwards_deadlocks():
    good = one_forward_one_backward(4, 8)
    early = list(good.ranks[0])
    early.insert(1, early.pop(early.index(Action(Kind.BACKWARD, 0, 0))))
    with pytest.raises(ValueError, match=r"deadlocks: waiting are B0\.0, F1\.1, F2\.1, F3\.1"):
        validate(dataclasses.replace(good, ranks=(tuple(early), *good.ranks[1:])))
