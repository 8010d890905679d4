"""The three binary files that the assignment reads, written as llm.c writes them: little-endian, 1024 bytes of header.

Source: github.com/karpathy/llm.c, `train_gpt2.py` (`write_model`, `write_tokenizer`) and `dev/data/data_common.py`.
"""

import struct
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from assignments.tinyinfinitrain.tests.model import Shape

CHECKPOINT_MAGIC, CHECKPOINT_VERSION = 20240326, 3
TOKENIZER_MAGIC = 20240328
TOKENS_16_BIT, TOKENS_32_BIT = (20240520, 1), (20240801, 7)  # (magic, version)
END_OF_TEXT = 50256  # GPT-2's
_HEADER_WORDS = 256

_BLOCK_ORDER = (
    "ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "attn.c_proj.bias",
    "ln_2.weight", "ln_2.bias", "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias",
)  # fmt: skip


def _header(*words: int) -> bytes:
    return struct.pack(f"<{_HEADER_WORDS}I", *words, *[0] * (_HEADER_WORDS - len(words)))


def checkpoint(parameters: Mapping[str, Tensor], shape: Shape) -> bytes:
    """Return a float32 checkpoint.

    Args:
        parameters: By the names of the framework's state dictionary, as `model.random_parameters` makes them.
        shape: Sizes; the token embedding is padded with zero rows up to `shape.padded_vocabulary`.
    """
    padding = torch.zeros(shape.padded_vocabulary - shape.vocabulary, shape.width)
    names = [f"transformer.h.{layer}.{name}" for name in _BLOCK_ORDER for layer in range(shape.layers)]
    tensors = [parameters["transformer.wte.weight"], padding, parameters["transformer.wpe.weight"]]
    tensors += [parameters[name] for name in (*names, "transformer.ln_f.weight", "transformer.ln_f.bias")]
    header = _header(
        CHECKPOINT_MAGIC, CHECKPOINT_VERSION, shape.block, shape.vocabulary, shape.layers, shape.heads, shape.width,
        shape.padded_vocabulary,
    )  # fmt: skip
    return header + b"".join(tensor.to(torch.float32).contiguous().numpy().tobytes() for tensor in tensors)


def token_file(tokens: Tensor, kind: tuple[int, int]) -> bytes:
    """Return a data set file.

    Args:
        tokens: (count,) int64, within 16 or 32 bits.
        kind: `TOKENS_16_BIT` or `TOKENS_32_BIT`; the magic alone tells the type of the data.
    """
    letter = "H" if kind == TOKENS_16_BIT else "I"
    return _header(*kind, len(tokens)) + struct.pack(f"<{len(tokens)}{letter}", *tokens.tolist())


def tokenizer_file(pieces: Sequence[bytes], version: int) -> bytes:
    """Return a tokenizer file of version 1 or 2: a byte of length and that many bytes for each token."""
    words = (TOKENIZER_MAGIC, version, len(pieces)) + ((END_OF_TEXT,) if version == 2 else ())
    return _header(*words) + b"".join(bytes([len(piece)]) + piece for piece in pieces)
