"""Mistakes that public code really made, put into the reference one at a time: equality with serial shows each.

The same plan without the mistake is equal (`test_factorisations`), so what is shown is the mistake.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from reference import autograd, comm, finalize, loss
from reference.context_parallel import ring_attention
from reference.expert_parallel import moe, routing
from reference.hybrid import stage, trainer
from reference.hybrid.plan import Plan
from reference.mesh import Mesh
from reference.pipeline_parallel import runtime
from reference.tensor_parallel import linear
from tests.reference.hybrid.test_factorisations import Run, expected_of, require_serial, run
from tests.reference.hybrid.training import DENSE, EXPERTS

SMALL, SMALL_EXPERTS = replace(DENSE, num_layers=2), replace(EXPERTS, num_layers=2)
Patch = pytest.MonkeyPatch


def planned(mesh: Mesh, *, experts: bool = False, **options) -> Run:
    return run(Plan(SMALL_EXPERTS if experts else SMALL, mesh, 8, 16, **options))


def bias_once_a_rank(patch: Patch) -> None:
    def forward(self, input):
        return autograd.reduce(F.linear(input, self.weight, self.bias), self.group)

    patch.setattr(linear.RowParallelLinear, "forward", forward)


def layout_without(patch: Patch, axis: str) -> None:
    real = stage.Stage._layout

    def wrong(self, name):
        layout = real(self, name)
        return replace(layout, partial=tuple(each for each in layout.partial if each != axis))

    patch.setattr(stage.Stage, "_layout", wrong)


def norms_not_reduced_over_tensor_ranks(patch: Patch) -> None:
    layout_without(patch, "tp")


def not_tied(patch: Patch) -> None:
    real = stage.Stage._layout
    patch.setattr(stage.Stage, "_layout", lambda self, name: replace(real(self, name), tied=False))


def tied_counted_on_both_stages_in_the_norm(patch: Patch) -> None:
    real = finalize.global_norm

    def wrong(gradients, groups):
        found = [(g, replace(x, sharded=(*x.sharded, "pp")) if x.tied else x) for g, x in gradients]
        return real(found, groups)

    patch.setattr(finalize, "global_norm", wrong)


def local_count(patch: Patch) -> None:
    patch.setattr(loss, "global_count", lambda targets, _: sum(loss.valid_count(t) for t in targets).clamp(min=1))


def scaled_by_microbatches(patch: Patch) -> None:
    real = loss.scaled
    patch.setattr(loss, "scaled", lambda total, count, *rest: real(total, count, *rest) * 2)


def keys_and_values_gradient_at_the_wrong_owner(patch: Patch) -> None:
    real, calls = comm.ring_shift, {"count": 0}

    def wrong(tensor, received, group, step=1):
        if tensor.dim() == 5 and tensor.shape[0] == 2:
            calls["count"] += 1
            if calls["count"] % 3 == 0:  # forward 1, backward 1 and 2 on two ranks: the last one stays where it is
                received.copy_(tensor)
                return comm.Pending()
        return real(tensor, received, group, step)

    patch.setattr(comm, "ring_shift", wrong)


def merged_without_weights(patch: Patch) -> None:
    def wrong(output, lse, block, block_lse):
        return output + block.to(output.dtype), torch.logaddexp(lse, block_lse)

    patch.setattr(ring_attention, "merge", wrong)


def positions_of_a_contiguous_layout(patch: Patch) -> None:
    real = stage.positions
    patch.setattr(stage, "positions", lambda n, rank, size, _: real(n, rank, size, stage.SequenceLayout.CONTIGUOUS))


def softmax_of_local_logits(patch: Patch) -> None:
    def wrong(logits, targets, group, *, vocabulary):
        local = targets - logits.shape[-1] * group.rank
        here = (local >= 0) & (local < logits.shape[-1])
        return autograd.reduce(loss.cross_entropy_sum(logits, local.where(here, loss.IGNORE)), group)

    patch.setattr(trainer, "cross_entropy_sum", wrong)


def auxiliary_loss_discarded(patch: Patch) -> None:
    patch.setattr(moe, "auxiliary_share", lambda found, load, config: found.logits.sum() * 0)


def auxiliary_loss_of_local_tokens(patch: Patch) -> None:
    def wrong(found, load, config):
        local = torch.bincount(found.experts.flatten(), minlength=config.num_experts)
        return routing.auxiliary_share(found, local, config)

    patch.setattr(moe, "auxiliary_share", wrong)


def capacity_not_enforced(patch: Patch) -> None:
    patch.setattr(moe.ExpertParallelMoE, "_within_capacity", lambda self, experts, load, tokens: experts)


def dropped_in_the_order_of_ranks(patch: Patch) -> None:
    patch.setattr(stage.Stage, "_token_index", lambda self: None)


def expert_gradients_times_the_group(patch: Patch) -> None:
    hooked = stage.Stage.__init__

    def init(self, *arguments):
        hooked(self, *arguments)
        for name, parameter in self.named_parameters():
            if ".experts." in name:
                parameter.register_hook(lambda gradient: gradient * 2)

    patch.setattr(stage.Stage, "__init__", init)


def only_the_last_microbatch_is_kept(patch: Patch) -> None:
    real = runtime._Step._backward

    def wrong(self, action):
        if action.microbatch:
            for stage_module in self._pipeline.stages.values():
                for parameter in stage_module.parameters():
                    parameter.grad = None
        real(self, action)

    patch.setattr(runtime._Step, "_backward", wrong)


BUGS: dict[Callable[[Patch], None], Run] = {
    bias_once_a_rank: planned(Mesh(tp=2)),
    softmax_of_local_logits: planned(Mesh(tp=2)),
    norms_not_reduced_over_tensor_ranks: planned(Mesh(tp=2), sequence_parallel=True),
    not_tied: planned(Mesh(pp=2), microbatches=2),
    tied_counted_on_both_stages_in_the_norm: planned(Mesh(pp=2), microbatches=2),
    local_count: planned(Mesh(cp=2)),
    scaled_by_microbatches: planned(Mesh(pp=2), microbatches=2),
    only_the_last_microbatch_is_kept: planned(Mesh(pp=2), microbatches=2),
    keys_and_values_gradient_at_the_wrong_owner: planned(Mesh(cp=2)),
    merged_without_weights: planned(Mesh(cp=2)),
    positions_of_a_contiguous_layout: planned(Mesh(cp=2)),
    auxiliary_loss_discarded: planned(Mesh(ep=2), experts=True),
    auxiliary_loss_of_local_tokens: planned(Mesh(ep=2), experts=True),
    capacity_not_enforced: planned(Mesh(ep=2), experts=True),
    dropped_in_the_order_of_ranks: planned(Mesh(cp=2), experts=True),
    expert_gradients_times_the_group: planned(Mesh(ep=2), experts=True),
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_equality_with_serial_training_shows(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    wanted = BUGS[bug]
    expected_of(wanted[1])  # before the mistake is put in
    bug(monkeypatch)
    with pytest.raises(AssertionError) as caught:
        require_serial([wanted], wanted[0].mesh.world_size)
    assert "Traceback" not in str(caught.value), "it must compute something else, and not break"


def test_without_a_mistake_all_are_equal() -> None:
    for plan, problem in {wanted[0].mesh: wanted for wanted in BUGS.values()}.values():
        require_serial([(plan, problem)], plan.mesh.world_size)
