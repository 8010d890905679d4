"""What a wrong answer looks like: a constant factor, zeros, one rank, one kind of parameter.

A sentence of this file is a hint: a student may see it of a hidden check too, so it holds no input and no expected
value.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_SAME = 1e-6  # relative spread under which ratios count as one constant; float64 noise lies far below, bugs far above

_KINDS: Mapping[str, Callable[[str], bool]] = {
    "biases": lambda name: name.endswith("bias"),
    "norm parameters": lambda name: "norm" in name or ".ln" in name or name.startswith("ln"),
    "embeddings": lambda name: "emb" in name or "wte" in name or "wpe" in name,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Where an answer comes from, so that a factor in it can be recognised.

    Attributes:
        rank: Whose answer it is; None where no ranks are involved.
        world_size: Ranks of the case.
        numbers: Other numbers of the case by what they are called in a sentence: {"the number of microbatches": 8}.
        labels: What else goes into the details: device, configuration.
    """

    rank: int | None = None
    world_size: int | None = None
    numbers: tuple[tuple[str, float], ...] = ()
    labels: tuple[tuple[str, str], ...] = ()

    def details(self) -> dict[str, object]:
        """Return it as the first lines of a failed check's details."""
        found: dict[str, object] = {"rank": self.rank, "world_size": self.world_size, **dict(self.labels)}
        return {key: value for key, value in found.items() if value is not None}

    def known_numbers(self) -> tuple[tuple[str, float], ...]:
        """Return what a factor may be: the case's own numbers, the world size first."""
        world = (("the world size", float(self.world_size)),) if self.world_size is not None else ()
        return tuple((name, number) for name, number in world + self.numbers if number not in {0.0, 1.0})


def describe(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], wrong: Collection[str], situation: Situation
) -> str:
    """Return one or two sentences on what the error looks like, or an empty text where it looks like nothing known.

    Args:
        got: The answers by name: finite, of the expected shapes.
        expected: The same names.
        wrong: The names that are over their bound; at least one.
        situation: What is known of the case.
    """
    sentences = (_describe_values(got, expected, wrong, situation), _describe_names(expected, wrong))
    return " ".join(sentence for sentence in sentences if sentence)


def _describe_values(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], wrong: Collection[str], situation: Situation
) -> str:
    mine = torch.cat([got[name].double().flatten() for name in sorted(wrong)])
    right = torch.cat([expected[name].double().flatten() for name in sorted(wrong)])
    subject = "every value" if len(wrong) == len(expected) else "every wrong tensor"
    if not bool(mine.any()):
        return f"{subject.capitalize()} is 0: nothing was computed, or what was computed never arrived."
    factor = constant_ratio(mine, right)
    if factor is not None:
        return f"{subject.capitalize()} is {factor:.6g}x the expected{name_factor(factor, situation)}."
    if mine.numel() > 1 and bool((mine == mine[0]).all()):
        return f"{subject.capitalize()} holds one and the same number."
    return _describe_places(got, expected, wrong)


def constant_ratio(got: Tensor, expected: Tensor) -> float | None:
    """Return c where got = c expected holds everywhere within rounding, and c is not 1; else None.

    Args:
        got: Flat, float64.
        expected: Flat, float64, same length.
    """
    energy = float(expected @ expected)
    if energy == 0.0 or not math.isfinite(energy):
        return None
    factor = float(got @ expected) / energy
    residual = float((got - factor * expected).abs().max())
    fits = residual <= _SAME * abs(factor) * float(expected.abs().max())
    return factor if fits and abs(factor - 1) > _SAME else None


def name_factor(factor: float, situation: Situation) -> str:
    """Return what a factor is of the case (": that is the world size"), or an empty text."""
    if abs(factor + 1) < _SAME:
        return ": the sign is wrong"
    known = situation.known_numbers()
    named = [(name, number) for name, number in known] + [(f"1 / {name}", 1 / number) for name, number in known]
    named += [(f"the square of {name}", number**2) for name, number in known]
    named += [(f"{one} / {other}", x / y) for one, x in known for other, y in known if one != other]
    for name, number in named:
        if abs(factor - number) <= _SAME * abs(number):
            return f": that is {name}"
    return ""


def _describe_places(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], wrong: Collection[str]) -> str:
    """Say it where a part is exactly right and another is not: rows, or a transposed matrix."""
    if len(wrong) != 1:
        return ""
    name = next(iter(wrong))
    mine, right = got[name].double(), expected[name].double()
    if mine.dim() == 2 and mine.shape[0] == mine.shape[1] and torch.allclose(mine.T, right, rtol=_SAME):
        return "It is the transpose of the expected matrix."
    if mine.dim() == 0 or mine.shape[0] < 2:
        return ""
    wrong_rows = [i for i in range(mine.shape[0]) if not torch.allclose(mine[i], right[i], rtol=_SAME, atol=0)]
    if 0 < len(wrong_rows) <= mine.shape[0] // 2:
        first, last = wrong_rows[0], wrong_rows[-1]
        return f"Only {len(wrong_rows)} of {mine.shape[0]} rows are wrong, from row {first} to row {last}."
    return ""


def _describe_names(expected: Mapping[str, Tensor], wrong: Collection[str]) -> str:
    """Say it where all wrong tensors, and no right ones, are of one kind."""
    if len(wrong) == len(expected):
        return ""
    for kind, belongs in _KINDS.items():
        if set(wrong) == {name for name in expected if belongs(name)}:
            return f"All {kind} are wrong, and only they."
    matrices = {name for name, tensor in expected.items() if tensor.dim() >= 2}
    if set(wrong) == matrices:
        return "All matrices are wrong, and only they."
    if len(wrong) == 1:
        return f"Only {next(iter(wrong))} is wrong."
    return ""
