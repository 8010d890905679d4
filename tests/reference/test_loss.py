"""One divisor for the whole step: ragged ranks and microbatches weigh by their valid tokens."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from reference import loss
from reference.comm import ALONE, Group
from tests.reference import ranks


def ragged(rank: int, microbatch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + microbatch)
    logits = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(5, (9,), generator=generator)
    targets[: (3 * rank + 2 * microbatch) % 9] = loss.IGNORE
    return logits, targets


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_shares_add_up_to_the_mean_over_all_valid_tokens(p: int, smoothing: float) -> None:
    def share(group: Group) -> Tensor:
        parts = [ragged(group.rank, m) for m in range(3)]
        count = loss.global_count([targets for _, targets in parts], group)
        sums = [loss.cross_entropy_sum(logits, targets, smoothing) for logits, targets in parts]
        return loss.reported(torch.stack([loss.scaled(part, count) for part in sums]).sum(), group)

    everything = [ragged(rank, m) for rank in range(p) for m in range(3)]
    logits, targets = (torch.cat(parts) for parts in zip(*everything, strict=True))
    want = F.cross_entropy(logits, targets, ignore_index=loss.IGNORE, label_smoothing=smoothing)
    for got in ranks.run(p, share):
        assert float(got) == pytest.approx(float(want), rel=1e-13)


def test_a_step_without_valid_tokens_has_loss_zero_and_not_nan() -> None:
    targets = torch.full((4,), loss.IGNORE)
    count = loss.global_count(targets, ALONE)
    assert int(count) == 1
    assert float(loss.scaled(loss.cross_entropy_sum(torch.randn(4, 3), targets), count)) == 0.0


def test_sixteen_bit_logits_are_summed_in_float32() -> None:
    logits = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.zeros(4000, dtype=torch.int64)
    total = loss.cross_entropy_sum(logits, targets)
    assert total.dtype == torch.float32
    assert float(total) == pytest.approx(float(loss.cross_entropy_sum(logits.double(), targets)), rel=1e-5)


def test_the_auxiliary_loss_is_a_mean_over_microbatches() -> None:
    share = loss.scaled(torch.tensor(6.0), torch.tensor(3), torch.tensor(0.8), microbatches=4)
    assert float(share) == pytest.approx(2.2)
