import os

import pytest

from grader.agent import streams
from grader.agent.streams import Log, Store


def filled_pipe(data: bytes) -> int:
    reading, writing = streams.pipe()
    os.write(writing, data)
    os.close(writing)
    os.set_blocking(reading, False)
    return reading


def contents(store: Store) -> bytes:
    reading, writing = streams.pipe()
    store.send_to(writing)
    os.close(writing)
    with open(reading, "rb") as pipe:
        return pipe.read()


@pytest.mark.parametrize("pieces", [[b"0123456789"], [b"0", b"123456789"], [bytes([c]) for c in b"0123456789"]])
def test_a_log_that_fits_is_kept_whole(pieces: list[bytes]):
    log = Log(10)
    for piece in pieces:
        log.add(piece)
    assert (log.kept(), log.truncated) == (b"0123456789", False)


@pytest.mark.parametrize("size", [1, 3, 7, 64, 1000])
def test_a_log_over_its_cap_keeps_both_ends_and_says_how_much_is_missing(size: int):
    whole = bytes(range(256)) * 20
    log = Log(100)
    for start in range(0, len(whole), size):
        log.add(whole[start : start + size])
    assert log.truncated
    assert log.kept() == whole[:50] + b"\n[... 5020 bytes left out ...]\n" + whole[-50:]


def test_a_log_without_room_keeps_nothing():
    log = Log(0)
    log.add(b"abc")
    assert log.kept() == b"\n[... 3 bytes left out ...]\n"


def test_a_store_takes_all_up_to_its_cap_and_no_more():
    store = Store(6)
    assert store.take_from(filled_pipe(b"abcdef"))
    assert (contents(store), store.overflowed) == (b"abcdef", False)
    assert not store.take_from(filled_pipe(b"g"))
    assert store.overflowed


def test_a_store_sees_the_end_of_the_stream_and_an_empty_pipe_apart():
    reading, writing = streams.pipe()
    os.set_blocking(reading, False)
    store = Store(6)
    assert store.take_from(reading)
    os.close(writing)
    assert not store.take_from(reading)
    assert not store.overflowed


def test_forwarding_moves_exactly_the_payload_and_leaves_what_follows():
    source, (reading, writing) = filled_pipe(b"payload|next"), streams.pipe()
    streams.forward(source, writing, 7)
    assert os.read(reading, 100) == b"payload"
    assert os.read(source, 100) == b"|next"


def test_forwarding_to_a_reader_that_is_gone_drops_exactly_the_payload():
    source, (reading, writing) = filled_pipe(b"payload|next"), streams.pipe()
    os.close(reading)
    streams.forward(source, writing, 7)
    assert os.read(source, 100) == b"|next"


def test_a_payload_that_ends_early_is_noticed():
    _, writing = streams.pipe()
    with pytest.raises(EOFError):
        streams.forward(filled_pipe(b"pay"), writing, 7)
