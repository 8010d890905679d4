import json
import struct

import pytest
import torch
from safetensors.torch import save

from grader.tracks.torch.tensors import TensorFormatError, pack, unpack


def forged(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
)
def test_what_is_packed_comes_back_bit_for_bit(dtype: torch.dtype):
    tensors = {"a": torch.arange(6).reshape(2, 3).to(dtype), "empty": torch.empty(0, 3, dtype=dtype)}
    found = unpack(pack({**tensors, "view": tensors["a"].t()}))
    assert all(torch.equal(found[name], tensor) and found[name].dtype == dtype for name, tensor in tensors.items())
    assert torch.equal(found["view"], tensors["a"].t())


def test_not_a_number_and_infinity_come_back_for_the_judge_to_see():
    found = unpack(pack({"x": torch.tensor([float("nan"), float("inf")])}))
    assert found["x"].isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        b"\0" * 8,
        b"\x80\x05]q\x00.",
        (5 << 20).to_bytes(8, "little") + b" " * (5 << 20),
        forged([]),
        forged({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}),
        forged({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"\0" * 4),
        forged({"x": {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 0]}}),
        forged({"x": {"dtype": "Z9", "shape": [1], "data_offsets": [0, 1]}}, b"\0"),
        save({"x": torch.ones(2, dtype=torch.bool)}),
        save({"x": torch.ones((1,) * 17)}),
        save({str(number): torch.ones(1) for number in range(10_001)}),
        save({"x": torch.ones(2)}) + b"\0",
    ],
)
def test_bytes_that_are_not_the_tensors_they_should_be_are_refused(data: bytes):
    with pytest.raises(TensorFormatError):
        unpack(data)
