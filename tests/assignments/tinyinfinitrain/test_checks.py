"""Every check passes a right student and fails one with a mistake that students really made."""

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import assignments
from assignments.tinyinfinitrain.tests import (
    test_adam,
    test_dispatcher,
    test_elementwise,
    test_gpt2,
    test_matmul,
    test_tensor,
    test_text,
)
from grader.judge.failure import CheckFailure
from grader.judge.outcome import Ended
from grader.record import CheckStatus
from grader.tracks.agent import SubmissionFailure
from tests.assignments.tinyinfinitrain import student
from tests.assignments.tinyinfinitrain.student import Student

FOLDER = Path(next(iter(assignments.__path__))) / "tinyinfinitrain"
CHECKS: dict[str, Callable[..., None]] = {
    "neg": test_elementwise.test_neg_and_its_gradient_change_the_sign,
    "matmul_2d": test_matmul.test_matrix_product_and_gradients,
    "matmul_batched": test_matmul.test_batched_product_and_gradients,
    "result_device": test_matmul.test_results_stay_on_cuda,
    "adam": test_adam.test_six_steps,
    "flatten": test_tensor.test_flatten_merges_a_range_of_dimensions,
    "flatten_negative_range": test_tensor.test_flatten_counts_negative_dimensions_from_the_end,
    "backward_shared_input": test_tensor.test_gradients_of_a_tensor_used_twice_add_up,
    "dispatcher": test_dispatcher.test_kernels_are_registered_called_and_refused,
    "dataset": test_text.test_every_sample_of_a_token_file,
    "tokenizer": test_text.test_every_token_decodes_to_its_bytes,
    "generate": test_text.test_generation_feeds_back_what_it_samples,
    "gpt2_logits": test_gpt2.test_logits,
    "gpt2_gradients": test_gpt2.test_every_gradient,
    "gpt2_training": test_gpt2.test_training,
}
NEEDS_A_DEVICE = {"matmul_2d", "matmul_batched", "adam", "generate", "gpt2_logits", "gpt2_gradients", "gpt2_training"}

MISTAKES = [
    ("neg", "gradient_not_negated", "failed", "sign is wrong"),
    ("neg", "nothing", "failed", "Not filled in: Neg::Forward"),
    ("matmul_2d", "nothing", "failed", "Not filled in: MatmulForward"),
    ("matmul_2d", "nan", "failed", "finite"),
    ("matmul_2d", "half_precision", "failed", "got"),
    ("matmul_batched", "backward_takes_two_dimensions", "crashed", "after it had handed back y"),
    ("matmul_batched", "broadcast_overflow", "failed", "grad_b"),
    ("result_device", "result_on_the_cpu", "failed", "lies on the CPU"),
    ("adam", "epsilon_inside_the_root", "failed", "after step 1"),
    ("adam", "no_bias_correction", "failed", "after step 1"),
    ("adam", "one_dimension_only", "failed", "shape (3, 5)"),
    ("adam", "unfilled", "failed", "Not filled in: AdamAccumulateGrad"),
    ("flatten", "middle_takes_the_wrong_dimensions", "failed", "middle"),
    ("flatten", "ignores_the_transpose", "failed", "after_transpose"),
    ("flatten_negative_range", "refuses_negative", "crashed", "start >= 0"),
    ("backward_shared_input", "gradient_overwritten", "failed", "square"),
    ("backward_shared_input", "unfilled", "failed", "Not filled in: Tensor::Backward"),
    ("dispatcher", "truncates", "failed", "int64"),
    ("dispatcher", "one_device", "failed", "two devices"),
    ("dispatcher", "duplicates_ignored", "failed", "second registration was accepted"),
    ("dispatcher", "says_nothing", "failed", "already registered"),
    ("dispatcher", "unregistered", "failed", "Not filled in: KernelFunction::Call"),
    ("dataset", "type_by_version", "failed", "token"),
    ("dataset", "signed", "failed", "is -"),
    ("dataset", "never_copied", "failed", "is 0"),
    ("dataset", "thirty_two_bits", "failed", "dtype"),
    ("dataset", "labels_not_shifted", "failed", "y of sample 0"),
    ("dataset", "one_too_many", "failed", "Size()"),
    ("dataset", "unfilled", "failed", "Not filled in: ReadTinyShakespeareFile"),
    ("tokenizer", "four_byte_lengths", "failed", "Decode"),
    ("tokenizer", "signed_lengths", "failed", "version_2"),
    ("tokenizer", "c_strings", "failed", "Decode"),
    ("tokenizer", "unfilled", "failed", "Not filled in: the Tokenizer"),
    ("generate", "wrong_place", "failed", "place t - 1"),
    ("generate", "wrong_row", "failed", "place t - 1"),
    ("generate", "not_fed_back", "failed", "place t - 1"),
    ("generate", "unfilled", "failed", "Not filled in: the Tokenizer"),
    ("gpt2_logits", "one_logit", "failed", "off by"),
    ("gpt2_logits", "nan", "failed", "finite"),
    ("gpt2_logits", "forward_takes_three_dimensions", "crashed", "linear.cc:25"),
    ("gpt2_gradients", "head_left_out", "failed", "2 of 30 are wrong"),
    ("gpt2_gradients", "twice", "failed", "2x the expected"),
    ("gpt2_gradients", "backward_takes_two_dimensions", "crashed", "linear.cc:76"),
    ("gpt2_training", "gradients_kept", "failed", "losses"),
    ("gpt2_training", "no_step", "failed", "losses"),
    ("gpt2_training", "backward_takes_two_dimensions", "skipped", "gpt2_gradients"),
]
# What differs from the oracle and is right all the same.
ALLOWED = [
    ("adam", "epsilon_before_correction", "Advice"),
    ("dataset", "last_left_out", ""),
    ("generate", "stops_after_one", "after 1 of 9 tokens"),
    ("gpt2_gradients", "untied", ""),
    ("flatten", "refuses_negative", ""),
]


def judge(check: str, mistake: str, seed: int = 0) -> tuple[str, str]:
    """Run one check on a student with that mistake and return its status and message."""
    return judge_student(check, Student(mistake), seed)


def judge_student(check: str, someone: Student, seed: int = 0) -> tuple[str, str]:
    """Run one check and return its status and message."""
    device = ("cpu",) if check in NEEDS_A_DEVICE else ()
    try:
        CHECKS[check](someone, torch.Generator().manual_seed(seed), *device)
    except CheckFailure as failure:
        return "failed", failure.message
    except SubmissionFailure as failure:
        return failure.status, failure.message
    except Ended as ended:
        return ended.status.value, ended.message
    return CheckStatus.PASSED.value, ""


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("check", CHECKS)
def test_a_right_student_passes(check: str, seed: int) -> None:
    assert judge(check, "", seed) == ("passed", "")


@pytest.mark.parametrize(("check", "mistake", "status", "words"), MISTAKES)
def test_a_mistake_is_caught_and_described(check: str, mistake: str, status: str, words: str) -> None:
    found, message = judge(check, mistake)
    assert found == status
    assert words in message


@pytest.mark.parametrize(("check", "mistake", "words"), ALLOWED)
def test_a_legitimate_difference_passes(check: str, mistake: str, words: str) -> None:
    found, message = judge(check, mistake)
    assert found == "passed"
    assert words in message


def test_a_missing_kernel_is_named_among_those_that_are_registered() -> None:
    class Unregistered(Student):
        def matmul(self, case: str, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return self.registered("MatmulForward", given)

    with pytest.raises(CheckFailure, match=r"Not registered for cpu: MatmulForward, MatmulBackward; the other 70 are"):
        CHECKS["matmul_2d"](Unregistered("no_matmul_kernel"), torch.Generator().manual_seed(0), "cpu")


def test_every_mistake_is_one_that_the_student_can_make() -> None:
    source = inspect.getsource(student)
    assert {mistake for _, mistake, *_ in [*MISTAKES, *ALLOWED] if f'"{mistake}"' not in source} == set()


ODD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scalars": lambda tensor: tensor.flatten()[0] if tensor.numel() else torch.zeros(()),
    "columns": lambda tensor: tensor.reshape(-1, 1),
    "doubles": lambda tensor: tensor.double(),
    "halves": lambda tensor: tensor.half(),
    "bytes": lambda tensor: tensor.to(torch.uint8),
    "unsigned": lambda tensor: tensor.to(torch.int64).to(torch.uint32),
    "negative": lambda tensor: tensor.to(torch.int64) * 0 - 5,
    "not_finite": lambda tensor: tensor.double() * torch.inf,
    "empty": lambda tensor: torch.zeros(0, dtype=tensor.dtype),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("check", CHECKS)
def test_odd_outputs_are_the_students_failure_and_never_ours(check: str, odd: str) -> None:
    class Odd(Student):
        def probe(self, *given: object) -> dict[str, torch.Tensor]:
            return {name: ODD[odd](tensor) for name, tensor in super().probe(*given).items()}

    status, message = judge_student(check, Odd())
    assert status in {"failed", "crashed", "timeout", "skipped"}
    assert message


@pytest.mark.parametrize("check", CHECKS)
def test_what_a_check_asks_for_is_in_the_programs(check: str) -> None:
    asked: set[tuple[str, str]] = set()

    class Noted(Student):
        def probe(self, name: str, inputs: student.Inputs, arguments: dict[str, str]) -> dict[str, torch.Tensor]:
            asked.add((name, arguments["probe"]))
            return super().probe(name, inputs, arguments)

    judge_student(check, Noted())
    assert asked
    for name, probe in asked:
        assert f'{{"{probe}", ' in (FOLDER / "probes" / f"{name}.cc").read_text(encoding="utf-8")
