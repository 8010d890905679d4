"""The llm.c checkpoint format: a GPT-2 as 256 integers and one run of numbers. Nothing is unpickled.

int32[256]   magic 20240326, version (3: float32, 5: bfloat16), positions, vocabulary, layers, heads,
             width, padded vocabulary, zeros
numbers      wte, wpe; then each of the following for all layers in turn: ln_1 weight, ln_1 bias,
             qkv weight, bias, attention projection weight, bias, ln_2 weight, bias, fc weight, bias,
             projection weight, bias; then ln_f weight, bias
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .model import GPT, GPTConfig

MAGIC = 20240326
HEADER_BYTES = 1024
_VERSIONS = {3: torch.float32, 5: torch.bfloat16}
_PER_LAYER = ("ln_1", "attention.qkv", "attention.proj", "ln_2", "mlp.fc", "mlp.proj")


def write_checkpoint(model: GPT, path: Path) -> None:
    """Write `model` as llm.c reads it: bfloat16 where the model is bfloat16, else float32.

    Raises:
        ValueError: The format has no room for the model: experts, rotary positions, grouped-query heads, or a
            feed-forward that is not four times as wide as the model.
    """
    config = model.config
    if config.num_experts or config.positions != "learned" or config.kv_heads != config.num_heads:
        raise ValueError("llm.c's GPT-2 format has no experts, rotary positions or grouped-query heads")
    if config.hidden != 4 * config.width:
        raise ValueError(f"llm.c's GPT-2 format has a feed-forward of {4 * config.width}, not of {config.hidden}")
    version = 5 if model.wte.weight.dtype == torch.bfloat16 else 3
    header = np.zeros(256, dtype="<i4")
    sizes = (config.max_positions, config.vocab_size, config.num_layers, config.num_heads, config.width)
    header[:8] = (MAGIC, version, *sizes, config.embedding_rows)
    with path.open("wb") as file:
        file.write(header.tobytes())
        for parameter in _in_order(model):
            numbers = parameter.detach().cpu().to(_VERSIONS[version]).contiguous()
            file.write(numbers.view(torch.uint8).numpy().tobytes())


def read_checkpoint(path: Path) -> GPT:
    """Read a GPT-2 that llm.c (or `write_checkpoint`) wrote.

    Raises:
        ValueError: The file is not such a checkpoint, is cut short, or goes on after its last parameter.
    """
    with path.open("rb") as file:
        header = np.frombuffer(file.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0"), dtype="<i4")
        magic, version, positions, vocabulary, layers, heads, width, padded = (int(number) for number in header[:8])
        if magic != MAGIC or version not in _VERSIONS:
            raise ValueError(
                f"{path} is no llm.c checkpoint: magic {magic}, version {version}; expected {MAGIC}, 3 or 5"
            )
        config = GPTConfig(
            vocabulary, positions, num_layers=layers, num_heads=heads, width=width, padded_vocab_size=padded
        )
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in GPT(config).parameters())
        expected = HEADER_BYTES + count * _VERSIONS[version].itemsize
        if path.stat().st_size != expected:
            raise ValueError(f"{path} has {path.stat().st_size} bytes; its header asks for {expected}")
        model = GPT(config, dtype=_VERSIONS[version])
        for parameter in _in_order(model):
            data = bytearray(file.read(parameter.nbytes))
            parameter.data.copy_(torch.frombuffer(data, dtype=parameter.dtype).view_as(parameter))
    return model


def _in_order(model: GPT) -> Iterator[Tensor]:
    yield model.wte.weight
    yield model.get_parameter("wpe.weight")
    for module in _PER_LAYER:
        for kind in ("weight", "bias"):
            for block in model.blocks:
                yield block.get_parameter(f"{module}.{kind}")
    yield from (model.ln_f.weight, model.ln_f.bias)
