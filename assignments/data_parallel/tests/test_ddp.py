"""One step of data-parallel training has the gradients of serial training, on every rank."""

from typing import Any

import pytest
import torch
from torch import Tensor

from assignments.data_parallel.harness import GRADIENT, PARAMETER
from assignments.data_parallel.tests import serial
from assignments.data_parallel.tests.serial import Step
from grader.judge.diagnosis import Situation
from grader.judge.failure import CheckFailure, require
from grader.judge.ranks import compare_ranks
from grader.judge.submission import TorchSubmission
from grader.tracks.torch.session import RankResult

BUCKET_BYTES = 2_000  # several buckets, none of them a whole layer
ITEM_BYTES = 8  # of float64


def run(submission: TorchSubmission, step: Step, generator: torch.Generator, **more: Any) -> tuple[RankResult, ...]:
    """Run the step on as many ranks as it has shards for."""
    arguments = {"config": dict(serial.CONFIG), "bucket_bytes": BUCKET_BYTES, "find_unused": True, **more}
    return submission.run("train_step", step.shards(generator), arguments)


def named(result: RankResult, prefix: str) -> dict[str, Tensor]:
    """Return a rank's tensors of one kind by the parameter's name."""
    return {name.removeprefix(prefix): t for name, t in result.tensors.items() if name.startswith(prefix)}


def check_step(step: Step, results: tuple[RankResult, ...]) -> None:
    """Compare every parameter and every gradient of every rank with serial training.

    A parameter that no rank used may have no gradient, as in serial training, or one of zeros.
    """
    microbatches = step.tokens.shape[1]
    situation = Situation(world_size=len(results), numbers=(("the number of microbatches", float(microbatches)),))
    parameters = [named(result, PARAMETER) for result in results]
    compare_ranks(parameters, step.parameters, kind="parameter", situation=situation)
    expected = step.gradients()
    unused = {name for name, gradient in expected.items() if gradient is None}
    used = {name: gradient for name, gradient in expected.items() if gradient is not None}
    gradients = [named(result, GRADIENT) for result in results]
    compare_ranks(gradients, used, kind="gradient", situation=situation)
    for rank, found in enumerate(gradients):
        for name in unused & set(found):
            require(
                not bool(found[name].any()),
                f"rank {rank}: {name} has a gradient that is not zero, though no rank used it",
                {"rank": rank, "tensor": name},
                "A parameter that no rank used has a gradient that is not zero.",
            )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.check(item="ddp", id="gradients_{ranks}_ranks")
def test_gradients_match_serial_when_tokens_are_uneven(
    submission: TorchSubmission, generator: torch.Generator, ranks: int
) -> None:
    """Uneven token counts, tied embeddings, odd sizes, several buckets; parameters start as rank 0's."""
    step = serial.draw(ranks, 1, generator)
    check_step(step, run(submission, step, generator))


@pytest.mark.check(item="ddp", id="accumulation")
def test_gradients_match_serial_over_ragged_microbatches(
    submission: TorchSubmission, generator: torch.Generator
) -> None:
    """Three microbatches, the first two inside `no_sync()`; each with its own number of valid tokens."""
    step = serial.draw(2, 3, generator)
    check_step(step, run(submission, step, generator))


@pytest.mark.check(item="ddp", id="unused_parameters")
def test_gradients_match_serial_when_some_ranks_leave_parameters_out(
    submission: TorchSubmission, generator: torch.Generator
) -> None:
    """Rank 0 never uses the adapter, the others only in an early microbatch; nobody uses the last layer."""
    step = serial.draw(3, 2, generator, adapted=True)
    check_step(step, run(submission, step, generator))


@pytest.mark.check(item="ddp", id="bytes_sent")
def test_a_step_sends_no_more_than_a_ring_needs(
    submission: TorchSubmission, generator: torch.Generator, metrics: dict[str, float]
) -> None:
    """A ring sends 2(p-1)/p of the gradients' bytes; per parameter one flag and one padded bucket more are allowed."""
    ranks = 4
    step = serial.draw(ranks, 2, generator)
    results = run(submission, step, generator)
    elements = sum(tensor.numel() for tensor in step.parameters.values())
    spare = len(step.parameters) * ranks  # a flag, and padding to a multiple of the ranks, for each
    limit = 2 * (ranks - 1) / ranks * ITEM_BYTES * (elements + spare + 1)  # and the count of valid tokens
    sent = [_number(result.values.get("bytes_sent")) for result in results]
    metrics["bytes_sent"], metrics["bytes_limit"] = max(sent), limit
    require(
        max(sent) <= limit,
        f"rank {sent.index(max(sent))} sent {max(sent):.0f} bytes in one step; a ring sends at most {limit:.0f}",
        {"rank": sent.index(max(sent)), "bytes_sent": sent, "bound": limit},
        "More bytes were sent than a ring needs: gather nothing, and sum each gradient once a step.",
    )
    check_step(step, results)


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
        raise CheckFailure(f"a rank reports {value!r} bytes sent, which is no number of bytes")
    return float(value)
