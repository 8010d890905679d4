"""Compares what every rank holds, and says whether the ranks agree where they are wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from grader.judge.diagnosis import Situation
from grader.judge.failure import CheckFailure
from grader.judge.tolerance import compare_all


def compare_ranks(
    got: Sequence[Mapping[str, Tensor]],
    expected: Mapping[str, Tensor],
    *,
    kind: str,
    situation: Situation | None = None,
    scale: float | None = None,
) -> None:
    """Compare the replicas of every rank with one expected set of float64 tensors.

    Args:
        got: Each rank's tensors by name.
        expected: The serial model's, which every rank should hold.
        kind: What they are: `gradient`, `parameter`.
        situation: What is known of the case; the rank is filled in.
        scale: As in `compare_all`.

    Raises:
        CheckFailure: As `compare_all`, of the first rank that is wrong; it names the others.
    """
    failures: dict[int, CheckFailure] = {}
    for rank, tensors in enumerate(got):
        here = replace(situation or Situation(), rank=rank, world_size=len(got))
        try:
            compare_all(tensors, expected, kind=kind, situation=here, scale=scale)
        except CheckFailure as failure:
            failures[rank] = failure
    if failures:
        first = failures[min(failures)]
        sentence = _describe(got, set(failures), expected, kind)
        raise CheckFailure(
            f"{first.message.removesuffix('.')}. {sentence}".strip(),
            {**first.details, "wrong_ranks": sorted(failures)},
            f"{first.hint} {sentence}".strip(),
        )


def _describe(got: Sequence[Mapping[str, Tensor]], wrong: set[int], expected: Mapping[str, Tensor], kind: str) -> str:
    if len(got) == 1:
        return ""
    if len(wrong) < len(got):
        numbers = ", ".join(str(rank) for rank in sorted(wrong))
        return f"Only rank {numbers} of {len(got)} differs; the other ranks have the right {kind}s."
    if all(_same(got[0], other, expected) for other in got[1:]):
        return f"All ranks hold the same wrong {kind}s."
    return f"The ranks disagree: each has {kind}s of its own, so not everything was exchanged between them."


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor], names: Mapping[str, Tensor]) -> bool:
    """Whether two ranks agree far more closely than either does with the right answer."""
    pairs = [(one.get(name), other.get(name)) for name in names]
    return all(_close(mine, yours) for mine, yours in pairs)


def _close(mine: Tensor | None, yours: Tensor | None) -> bool:
    if mine is None or yours is None:
        return mine is yours
    return (
        mine.shape == yours.shape
        and mine.dtype == yours.dtype
        and torch.allclose(mine, yours, rtol=1e-9, atol=0, equal_nan=True)
    )
