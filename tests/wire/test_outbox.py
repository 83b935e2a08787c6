"""The queue's account closes to the token, and its memory is bounded and reused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dlc_sentinel.wire.outbox import Blocks, Outbox, Parcel

OFFER = st.tuples(st.just("offer"), st.integers(1, 50), st.integers(1, 400))
STEPS = st.lists(st.one_of(OFFER, st.tuples(st.sampled_from(["take", "refuse"]), st.integers(1, 9), st.just(0))))


@given(STEPS)
def test_tokens_offered_are_those_taken_dropped_and_waiting(steps: list[tuple[str, int, int]]) -> None:
    outbox = Outbox(1000)
    taken = waiting = 0
    for what, num_tokens, num_bytes in steps:
        if what == "offer":
            waiting += num_tokens * outbox.offer(Parcel(None, num_tokens, num_bytes))
        elif what == "refuse":
            outbox.refuse("mis_sized", num_tokens)
        elif (parcel := outbox.take()) is not None:
            outbox.done(parcel.num_bytes)
            taken, waiting = taken + parcel.num_tokens, waiting - parcel.num_tokens
        assert outbox.num_bytes <= 1000
    offered, dropped, _ = outbox.account()

    assert offered == taken + waiting + sum(dropped.values())


def test_a_record_without_tokens_still_finds_room_in_a_full_queue() -> None:
    outbox = Outbox(1000)
    outbox.offer(Parcel(None, 5, 1000))

    assert not outbox.offer(Parcel(None, 5, 1))
    assert outbox.offer(Parcel(None))


def test_records_without_tokens_are_bounded_too() -> None:
    outbox = Outbox(1000)

    assert not all(outbox.offer(Parcel(None)) for _ in range(10_000))


def test_what_is_left_at_the_end_is_counted() -> None:
    outbox = Outbox(1000)
    outbox.offer(Parcel(None, 7, 10))

    outbox.drop_all()

    assert outbox.account() == (7, {"queue_full": 7}, 0)


@given(st.integers(0, 2**22))
def test_a_block_is_at_most_a_quarter_or_a_page_too_large(num_bytes: int) -> None:
    size = Blocks().take(num_bytes).size

    assert num_bytes <= size <= max(num_bytes * 5 // 4 + 1, num_bytes + 4096)


def test_a_block_given_back_is_used_again_and_beyond_the_bound_freed() -> None:
    blocks = Blocks(max_bytes=8192)
    first, second = blocks.take(8192), blocks.take(8192)
    blocks.give(first)
    blocks.give(second)

    assert blocks.take(8000) is first
    assert blocks.take(8000) is not second


def test_warming_keeps_spare_blocks_of_the_size_in_use() -> None:
    blocks = Blocks()
    blocks.take(5000)
    blocks.warm(spare=1)
    spare = blocks.take(5000)
    blocks.give(spare)

    assert blocks.take(5000) is spare
