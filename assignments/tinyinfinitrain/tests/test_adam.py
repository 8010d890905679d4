"""Six steps of Adam (Kingma & Ba 2015, arXiv:1412.6980, algorithm 1), with bounds that follow each rounding.

The second moment's decay is 0.95: at 0.999 the term 1 - beta^t loses a thousand roundings in single precision, so that
legitimate programs differ visibly.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from assignments.tinyinfinitrain.tests import cases, tasks
from assignments.tinyinfinitrain.tests.cases import Outcome, Submission
from assignments.tinyinfinitrain.tests.rounding import ROUNDOFF
from grader.judge.failure import CheckFailure
from grader.judge.outcome import Ended
from grader.judge.tolerance import compare_within, gamma
from grader.record import CheckStatus

SHAPES = ((6,), (3, 5), (2, 3, 4))
STEPS = 6
RATE, BETA1, BETA2 = 0.01, 0.9, 0.95
DEFAULT_EPSILON, LARGE_EPSILON = 1e-8, 1e-2
SCALED_ADVICE = (
    "Advice, at no loss: epsilon is added to sqrt(v) before the bias correction. The handout, and torch, add it to "
    "sqrt(v_hat) after it; at a large epsilon the two differ."
)
_LIBRARY_FUNCTION = 4  # roundings that a power or a root counts as


@dataclass(frozen=True, slots=True)
class Settings:
    """Hyperparameters as single precision holds them; `scaled` puts epsilon inside the bias correction."""

    rate: float
    beta1: float
    beta2: float
    epsilon: float
    scaled: bool = False

    @classmethod
    def rounded(cls, epsilon: float, *, scaled: bool = False) -> "Settings":
        """Return the course's settings, rounded to single precision."""
        rate, beta1, beta2, small = torch.tensor([RATE, BETA1, BETA2, epsilon], dtype=torch.float32).double().tolist()
        return cls(rate, beta1, beta2, small, scaled)

    def tensor(self) -> Tensor:
        """Return them as the probe reads them."""
        return torch.tensor([self.rate, self.beta1, self.beta2, self.epsilon], dtype=torch.float32)


def adam(parameter: Tensor, gradients: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Return the parameter after every step, and how far single precision may be from it.

    Args:
        parameter: Any shape, float64.
        gradients: (steps, ...), float64.
        settings: Hyperparameters. Where `scaled`, the paper's section 2 variant: the step is
            rate sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + epsilon).

    Returns:
        Two tensors (steps, ...): the values, and their bounds. A moment of t steps carries 3 t roundings (of the sum
        of absolute values), a bias correction those of beta^t divided by 1 - beta^t, a root half of its argument's.
    """
    first, second, absolute, drift = (torch.zeros_like(parameter) for _ in range(4))
    values, bounds = [], []
    for step, gradient in enumerate(gradients, start=1):
        first = settings.beta1 * first + (1 - settings.beta1) * gradient
        absolute = settings.beta1 * absolute + (1 - settings.beta1) * gradient.abs()
        second = settings.beta2 * second + (1 - settings.beta2) * gradient.square()
        correction1, correction2 = 1 - settings.beta1**step, 1 - settings.beta2**step
        epsilon = settings.epsilon / correction2**0.5 if settings.scaled else settings.epsilon
        divisor = (second / correction2).sqrt() + epsilon
        parameter = parameter - settings.rate * first / correction1 / divisor
        lost = [_lost(beta, step) for beta in (settings.beta1, settings.beta2)]
        relative = gamma(3 * step + 2 * step + 2 * _LIBRARY_FUNCTION + 6, ROUNDOFF) + lost[0] + lost[1] / 2
        drift = drift + relative * settings.rate * absolute / correction1 / divisor + ROUNDOFF * parameter.abs()
        values.append(parameter)
        bounds.append(drift)
    return torch.stack(values), torch.stack(bounds)


def _lost(beta: float, step: int) -> float:
    """Return the relative error of 1 - beta^step, which is a small difference of rounded numbers."""
    power = beta**step
    return gamma(_LIBRARY_FUNCTION + step, ROUNDOFF) * power / (1 - power) + ROUNDOFF / (1 - power)


def draw(generator: torch.Generator, settings: Settings) -> dict[str, Tensor]:
    """Return parameters, a gradient a step for each, and the settings."""
    found = {"hyper": settings.tensor()}
    for index, shape in enumerate(SHAPES):
        found[f"param.{index}"] = torch.randn(shape, generator=generator)
        # Magnitudes from about 1e-3 to 1, so that epsilon matters for some elements and not for others.
        scale = 10 ** (torch.rand(shape, generator=generator) * -3)
        found[f"grad.{index}"] = torch.randn((STEPS, *shape), generator=generator) * scale
    return found


def compare_steps(outcome: Outcome, inputs: dict[str, Tensor], settings: Settings) -> None:
    """Compare every parameter after every step.

    Raises:
        CheckFailure: For the first step at which one is wrong.
    """
    for index in range(len(SHAPES)):
        start = inputs[f"param.{index}"]
        values, bounds = adam(start.double(), inputs[f"grad.{index}"].double(), settings)
        for step in range(STEPS):
            name = f"param.{index}.{step}"
            label = f"parameter of shape {tuple(start.shape)} after step {step + 1} ({outcome.case})"
            compare_within(outcome.get(name), values[step], bounds[step], name=label)


def require_changed(outcome: Outcome, inputs: dict[str, Tensor], device: str) -> None:
    """Say it where no parameter ever moved."""
    starts = [inputs[f"param.{index}"] for index in range(len(SHAPES))]
    ends = [outcome.get(f"param.{index}.{STEPS - 1}") for index in range(len(SHAPES))]
    kept = [
        end is not None and end.dtype == start.dtype and torch.equal(end, start)
        for start, end in zip(starts, ends, strict=True)
    ]
    if all(kept):
        raise cases.unfilled(tasks.ADAM[device], "no parameter changes")


@pytest.mark.check(item="adam", id="probe/adam")
@pytest.mark.check(item="adam_cuda", id="probe/adam")
def test_six_steps(submission: Submission, generator: torch.Generator, device: str) -> None:
    """At the default epsilon as in the paper; at a large one, epsilon may stand inside the bias correction."""
    settings = {"default_epsilon": DEFAULT_EPSILON, "large_epsilon": LARGE_EPSILON}
    inputs = {case: draw(generator, Settings.rounded(epsilon)) for case, epsilon in settings.items()}

    scaled: list[str] = []

    def judge(outcome: Outcome) -> None:
        own, epsilon = inputs[outcome.case], settings[outcome.case]
        require_changed(outcome, own, device)
        try:
            compare_steps(outcome, own, Settings.rounded(epsilon))
        except CheckFailure:
            if not _is_scaled(outcome, own, epsilon):
                raise
            scaled.append(outcome.case)

    outcomes = cases.run(submission, "kernels", "adam", inputs, device=device)
    cases.judge_each(submission, tasks.ADAM[device], outcomes, judge, device=device)
    if scaled:
        raise Ended(CheckStatus.PASSED, SCALED_ADVICE)


def _is_scaled(outcome: Outcome, inputs: dict[str, Tensor], epsilon: float) -> bool:
    try:
        compare_steps(outcome, inputs, Settings.rounded(epsilon, scaled=True))
    except CheckFailure:
        return False
    return True
