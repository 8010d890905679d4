import io

import pytest

from grader import wire
from grader.errors import WireError
from grader.wire import Frame


def test_a_frame_comes_back_as_it_was_sent_and_the_next_one_after_it():
    frames = [Frame({"kind": "a", "n": [1, None]}, b"\x00\xff"), Frame({})]
    stream = io.BytesIO(b"".join(wire.encode(frame) for frame in frames))
    assert [wire.read(stream), wire.read(stream), wire.read(stream)] == [*frames, None]


def test_a_header_alone_leaves_the_payload_in_the_stream():
    stream = io.BytesIO(wire.encode_header({"kind": "a"}, 3) + b"abcrest")
    assert wire.read_header(stream) == ({"kind": "a"}, 3)
    assert stream.read() == b"abcrest"


@pytest.mark.parametrize(
    "data",
    [
        b"T",
        b"TIG2" + b"\0" * 12,
        b"TIG1" + b"\xff\xff\xff\xff" + b"\0" * 8,
        b"TIG1" + b"\x02\0\0\0" + b"\xff" * 8 + b"{}",
        b"TIG1" + b"\x02\0\0\0" + b"\0" * 8 + b"[]",
        b"TIG1" + b"\x02\0\0\0" + b"\0" * 8 + b"{",
        b"TIG1" + b"\x03\0\0\0" + b"\0" * 8 + b"{}\xff",
        wire.encode(Frame({}, b"abc"))[:-1],
        wire.encode_header({}, 0).replace(b"\x02\0\0\0", (100_000).to_bytes(4, "little")) + b"[" * 100_000,
    ],
)
def test_bytes_that_are_no_frame_are_refused(data: bytes):
    with pytest.raises(WireError):
        wire.read(io.BytesIO(data))


def test_a_payload_over_the_readers_cap_is_refused_before_it_is_read():
    stream = io.BytesIO(wire.encode(Frame({}, b"abcd")))
    with pytest.raises(WireError, match="cap is 3"):
        wire.read(stream, 3)


def test_what_is_over_the_cap_is_not_sent():
    with pytest.raises(WireError):
        wire.encode(Frame({"x": "y" * wire.MAX_HEADER_BYTES}))
