"""A tiny GPT-2 with random weights: logits, every parameter's gradient, and training, against float64."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, sqrt

import pytest
import torch
from torch import Tensor

from assignments.tinyinfinitrain.tests import cases, formats, model, tasks
from assignments.tinyinfinitrain.tests.cases import Outcome, Submission
from assignments.tinyinfinitrain.tests.model import Parameters, Shape
from grader.judge.failure import CheckFailure, require
from grader.judge.outcome import Ended
from grader.judge.tolerance import LowPrecision, compare_low_precision, root_mean_square
from grader.record import CheckStatus
from grader.tracks.agent import SubmissionFailure

SHAPE = Shape()
STEPS, ACCUMULATE, BATCH, LENGTH, RATE = 3, 2, 2, 8, 0.05
LAMBDA = 6.0  # so that one right answer in about ten million is refused
FROZEN = (model.EMBEDDING, model.HEAD)


def compare(found: Mapping[str, Tensor | None], exact: Parameters, serial: Parameters, *, kind: str, path: int) -> None:
    """Compare every tensor of a kind by root mean square.

    The bound is twice the error that torch's float32 itself makes, and that of `path` roundings one upon the other,
    since a program may sum one by one where torch sums in blocks. Independent roundings add up to lambda sqrt(n) u but
    with a probability under 2 exp(-lambda^2 / 2) (Higham & Mary 2019, SIAM J. Sci. Comput. 41(5), theorem 2.4).

    Raises:
        CheckFailure: For the first tensor that is wrong, with the number of those that are.
    """
    largest, roundings = root_mean_square(exact), ceil(LAMBDA * sqrt(path))
    failures: dict[str, CheckFailure] = {}
    for name, tensor in exact.items():
        scale = max(root_mean_square({name: tensor}), largest)
        expected = LowPrecision(exact=tensor, serial=serial[name], partial_rms=scale, ranks=roundings + 1)
        try:
            compare_low_precision(found.get(name), expected, name=f"{kind} {name}")
        except CheckFailure as failure:
            failures[name] = failure
    if failures:
        first = next(iter(failures.values()))
        details = {**first.details, "wrong": sorted(failures), "compared": len(exact)}
        count = f" {len(failures)} of {len(exact)} are wrong." if len(exact) > 1 else ""
        raise CheckFailure(f"{first.message}.{count}".replace("..", "."), details, first.hint)


def in_both(parameters: Parameters) -> dict[torch.dtype, Parameters]:
    """Return the parameters in float64, where they are exact, and in float32."""
    return {dtype: model.as_leaves(parameters, dtype) for dtype in (torch.float64, torch.float32)}


@pytest.mark.check(item="gpt2", id="probe/gpt2_logits")
@pytest.mark.check(item="gpt2", id="probe/gpt2_logits_cuda")
def test_logits(submission: Submission, generator: torch.Generator, device: str) -> None:
    """A batch shorter than the longest sequence, and one sequence of full length."""
    parameters = model.random_parameters(SHAPE, generator)
    inputs = {
        case: {"tokens": torch.randint(0, SHAPE.vocabulary, size, generator=generator)}
        for case, size in {"batch": (2, 7), "full_length": (1, SHAPE.block)}.items()
    }
    files = {"model.bin": formats.checkpoint(parameters, SHAPE)}

    def judge(outcome: Outcome) -> None:
        tokens = inputs[outcome.case]["tokens"]
        exact, serial = (
            {"logits": model.logits(held, tokens, SHAPE).detach()} for held in in_both(parameters).values()
        )
        compare(outcome.tensors, exact, serial, kind=outcome.case, path=SHAPE.forward_path)

    outcomes = cases.run(submission, "gpt2", "logits", inputs, device=device, files=files)
    cases.judge_each(submission, tasks.GPT2, outcomes, judge, device=device)


@pytest.mark.check(item="gpt2", id="probe/gpt2_gradients")
@pytest.mark.check(item="gpt2", id="probe/gpt2_gradients_cuda")
def test_every_gradient(submission: Submission, generator: torch.Generator, device: str) -> None:
    """The loss, and the gradient of every parameter that the framework lists."""
    check_gradients(submission, generator, device)


def check_gradients(submission: Submission, generator: torch.Generator, device: str) -> None:
    """Run and judge one backward.

    Raises:
        CheckFailure: The loss or a gradient is wrong.
        SubmissionFailure: It did not come to its end.
    """
    parameters = model.random_parameters(SHAPE, generator)
    text = torch.randint(0, SHAPE.vocabulary, (BATCH, LENGTH + 1), generator=generator)
    given = {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}
    files = {"model.bin": formats.checkpoint(parameters, SHAPE)}
    outcomes = cases.run(submission, "gpt2", "gradients", {"gradients": given}, device=device, files=files)

    def judge(outcome: Outcome) -> None:
        results = {
            dtype: model.gradients(held, given["tokens"], given["targets"], SHAPE)
            for dtype, held in in_both(parameters).items()
        }
        (exact_loss, exact), (serial_loss, serial) = results[torch.float64], results[torch.float32]
        compare(outcome.tensors, {"loss": exact_loss}, {"loss": serial_loss}, kind="the", path=SHAPE.gradient_path)
        if outcome.number("tied") == 1:
            exact, serial = model.tie(exact), model.tie(serial)
        found = {name: outcome.get(f"grad.{name}") for name in exact}
        compare(found, exact, serial, kind="gradient of", path=SHAPE.gradient_path)

    cases.judge_each(submission, tasks.GPT2, outcomes, judge, device=device)


@dataclass(frozen=True, slots=True)
class Trained:
    """What training leaves: the loss of every microbatch, and the parameters at the end."""

    losses: Tensor
    parameters: Parameters


def train(start: Parameters, tokens: Tensor) -> Trained:
    """Train as the probe does: plain gradient descent on sums over microbatches, the tied weight left as it is."""
    parameters = {name: tensor.detach().clone().requires_grad_() for name, tensor in start.items()}
    trained = [tensor for name, tensor in parameters.items() if name not in FROZEN]
    losses, samples = [], 0
    for _ in range(STEPS):
        for _ in range(ACCUMULATE):
            places = torch.arange(samples, samples + BATCH)[:, None] * LENGTH + torch.arange(LENGTH)
            samples += BATCH
            value = model.loss(parameters, tokens[places], tokens[places + 1], SHAPE)
            torch.autograd.backward(value)
            losses.append(value.detach())
        for parameter in trained:  # torch.optim costs a judge two seconds of imports
            assert parameter.grad is not None
            parameter.data.sub_(parameter.grad, alpha=RATE)
            parameter.grad = None
    return Trained(torch.stack(losses), {name: tensor.detach() for name, tensor in parameters.items()})


@pytest.mark.check(item="gpt2", id="probe/gpt2_training")
@pytest.mark.check(item="gpt2", id="probe/gpt2_training_cuda")
def test_training(submission: Submission, generator: torch.Generator, device: str) -> None:
    """Three steps of two microbatches, with the framework's data set, loader, loss and optimizer."""
    parameters = model.random_parameters(SHAPE, generator)
    tokens = torch.randint(0, SHAPE.vocabulary, (LENGTH * (STEPS * ACCUMULATE * BATCH + 2),), generator=generator)
    files = {
        "model.bin": formats.checkpoint(parameters, SHAPE),
        "tokens.bin": formats.token_file(tokens, formats.TOKENS_16_BIT),
    }
    numbers = {"length": LENGTH, "batch": BATCH, "steps": STEPS, "accumulate": ACCUMULATE}
    given = {name: torch.tensor([number]) for name, number in numbers.items()}
    given["learning_rate"] = torch.tensor([RATE])

    def judge(outcome: Outcome) -> None:
        exact, serial = (train(held, tokens) for held in in_both(parameters).values())
        path = STEPS * SHAPE.gradient_path
        _require_losses(outcome, exact)
        compare(outcome.tensors, {"losses": exact.losses}, {"losses": serial.losses}, kind="the", path=path)
        found = {name: outcome.get(f"param.{name}") for name in exact.parameters}
        compare(found, exact.parameters, serial.parameters, kind="trained", path=path)

    outcomes = cases.run(submission, "gpt2", "training", {"training": given}, device=device, files=files)
    try:
        cases.judge_each(submission, tasks.GPT2, outcomes, judge, device=device)
    except (CheckFailure, SubmissionFailure) as failure:
        if "unfilled" not in failure.details:
            _skip_without_gradients(submission, generator, device)
        raise


def _require_losses(outcome: Outcome, exact: Trained) -> None:
    found = outcome.get("losses")
    if found is not None and found.shape == exact.losses.shape and bool(found.isfinite().all()):
        still = len(found) > 1 and float(found.max() - found.min()) == 0.0
        require(not still, "the loss never changes: nothing is learned", {"losses": found.tolist()})


def _skip_without_gradients(submission: Submission, generator: torch.Generator, device: str) -> None:
    """Training on wrong gradients says nothing new: then this check is skipped, and the other one fails."""
    try:
        check_gradients(submission, generator, device)
    except (CheckFailure, SubmissionFailure):
        raise Ended(CheckStatus.SKIPPED, "gpt2_gradients fails, on which training depends") from None
