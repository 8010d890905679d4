"""GPT-2 as a function of its parameters, in whatever precision they have: the oracle for the C++ framework.

The architecture is GPT-2's (Radford et al. 2019) with the tanh form of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415,
section 2). Two peculiarities are the framework's: the output layer has a bias, which starts at zero, and its weight is
the token embedding's on the CPU, but a copy of it once the model has been moved to another device. So the two uses of
that weight are two arguments here, and the caller adds their gradients where they are one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

EMBEDDING, HEAD, HEAD_BIAS = "transformer.wte.weight", "lm_head.weight", "lm_head.bias"
Parameters = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model. `block` is the longest sequence."""

    layers: int = 2
    heads: int = 2
    width: int = 16
    vocabulary: int = 37
    padded_vocabulary: int = 64
    block: int = 11

    @property
    def forward_path(self) -> int:
        """How many roundings lie one upon the other on the longest path from the parameters to a logit.

        A sum of n products contributes n. A block sums over the width in two normalisations (three times each: mean,
        variance, scaling) and in three matrices, over four widths in the last one, and in the attention over the
        head's size and, for the softmax, its divisor and the mixing, over the sequence.
        """
        head = self.width // self.heads
        a_block = (6 + 3 + 4) * self.width + head + 3 * self.block
        return self.layers * a_block + 4 * self.width

    @property
    def gradient_path(self) -> int:
        """The same to a gradient: the forward, the softmax over the vocabulary, and two products for each of before."""
        return 3 * self.forward_path + self.vocabulary


def random_parameters(shape: Shape, generator: torch.Generator) -> Parameters:
    """Return random float32 parameters by the names of the framework's state dictionary.

    `lm_head.weight` is the token embedding and `lm_head.bias` is zero, as they are after reading a checkpoint.
    """

    def normal(*size: int, mean: float = 0.0, deviation: float = 0.25) -> Tensor:
        return torch.randn(*size, generator=generator) * deviation + mean

    width = shape.width
    parameters = {EMBEDDING: normal(shape.vocabulary, width), "transformer.wpe.weight": normal(shape.block, width)}
    for layer in range(shape.layers):
        start = f"transformer.h.{layer}."
        for name, rows, columns in (
            ("attn.c_attn", 3 * width, width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", 4 * width, width),
            ("mlp.c_proj", width, 4 * width),
        ):
            parameters[f"{start}{name}.weight"] = normal(rows, columns)
            parameters[f"{start}{name}.bias"] = normal(rows, deviation=0.1)
        for name in ("ln_1", "ln_2"):
            parameters[f"{start}{name}.weight"] = normal(width, mean=1.0, deviation=0.1)
            parameters[f"{start}{name}.bias"] = normal(width, deviation=0.1)
    parameters["transformer.ln_f.weight"] = normal(width, mean=1.0, deviation=0.1)
    parameters["transformer.ln_f.bias"] = normal(width, deviation=0.1)
    return parameters | {HEAD: parameters[EMBEDDING], HEAD_BIAS: torch.zeros(shape.vocabulary)}


def as_leaves(parameters: Mapping[str, Tensor], dtype: torch.dtype) -> Parameters:
    """Return copies that gradients are taken of; the embedding and the output layer become two."""
    return {name: tensor.detach().to(dtype, copy=True).requires_grad_() for name, tensor in parameters.items()}


def logits(parameters: Parameters, tokens: Tensor, shape: Shape) -> Tensor:
    """Return (batch, sequence, vocabulary) for tokens (batch, sequence) int64."""
    x = F.embedding(tokens, parameters[EMBEDDING]) + parameters["transformer.wpe.weight"][: tokens.shape[1]]
    for layer in range(shape.layers):
        own = {
            name.removeprefix(f"transformer.h.{layer}."): tensor
            for name, tensor in parameters.items()
            if name.startswith(f"transformer.h.{layer}.")
        }
        x = x + _attention(own, _normalise(own, "ln_1", x), shape)
        hidden = F.gelu(_linear(own, "mlp.c_fc", _normalise(own, "ln_2", x)), approximate="tanh")
        x = x + _linear(own, "mlp.c_proj", hidden)
    final = {name.removeprefix("transformer."): tensor for name, tensor in parameters.items()}
    return F.linear(_normalise(final, "ln_f", x), parameters[HEAD], parameters[HEAD_BIAS])


def loss(parameters: Parameters, tokens: Tensor, targets: Tensor, shape: Shape) -> Tensor:
    """Return the mean cross entropy over all places."""
    return F.cross_entropy(logits(parameters, tokens, shape).flatten(0, 1), targets.flatten())


def gradients(parameters: Parameters, tokens: Tensor, targets: Tensor, shape: Shape) -> tuple[Tensor, Parameters]:
    """Return the loss and the gradient of every parameter, the two uses of the tied weight apart."""
    value = loss(parameters, tokens, targets, shape)
    found = torch.autograd.grad(value, list(parameters.values()))
    return value.detach(), dict(zip(parameters, found, strict=True))


def tie(found: Parameters) -> Parameters:
    """Return gradients where the embedding and the output layer are one weight: both names hold the sum."""
    total = found[EMBEDDING] + found[HEAD]
    return found | {EMBEDDING: total, HEAD: total}


def _linear(parameters: Parameters, name: str, x: Tensor) -> Tensor:
    return F.linear(x, parameters[f"{name}.weight"], parameters[f"{name}.bias"])


def _normalise(parameters: Parameters, name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], parameters[f"{name}.weight"], parameters[f"{name}.bias"], eps=1e-5)


def _attention(parameters: Parameters, x: Tensor, shape: Shape) -> Tensor:
    batch, length, width = x.shape
    parts = _linear(parameters, "attn.c_attn", x).chunk(3, dim=2)
    query, key, value = (part.view(batch, length, shape.heads, width // shape.heads).transpose(1, 2) for part in parts)
    scores = query @ key.transpose(-2, -1) * (width // shape.heads) ** -0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(future, -torch.inf).softmax(-1) @ value
    return _linear(parameters, "attn.c_proj", mixed.transpose(1, 2).reshape(batch, length, width))
