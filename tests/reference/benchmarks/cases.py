"""What is raced against what. Sizes are fixed, large enough that a step takes at least 50 ms on two cores."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F

from reference.comm import Group
from reference.context_parallel.layout import Layout
from reference.context_parallel.ring_attention import ring_attention
from reference.data_parallel.ddp import DistributedDataParallel
from reference.data_parallel.zero1 import Zero1
from reference.data_parallel.zero3 import Zero3
from reference.expert_parallel.moe import ExpertParallelMoE
from reference.expert_parallel.routing import auxiliary_share
from reference.model import GPTConfig, MoE
from reference.pipeline_parallel.actions import Kind, Schedule
from reference.pipeline_parallel.gpipe import gpipe
from reference.pipeline_parallel.interleaved import interleaved_1f1b
from reference.pipeline_parallel.one_forward_one_backward import one_forward_one_backward
from reference.pipeline_parallel.runtime import Pipeline
from reference.pipeline_parallel.split_linear import SplitLinear
from reference.pipeline_parallel.zero_bubble import zero_bubble
from reference.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from reference.tensor_parallel.vocabulary import cross_entropy_sum
from tests.reference.benchmarks.measure import Sides

WIDTH, DEPTH, ROWS = 1024, 6, 64


def stack(depth: int = DEPTH, width: int = WIDTH, linear: type[nn.Linear] = nn.Linear, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(linear(width, width), nn.GELU()) for _ in range(depth)))


def rows_of(rank: int, count: int = ROWS, width: int = WIDTH) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(rank))


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {str(number): p.grad for number, p in enumerate(module.parameters()) if p.grad is not None}


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {str(number): p for number, p in enumerate(module.parameters())}


def ddp(group: Group) -> Sides:
    x = rows_of(group.rank)
    own = DistributedDataParallel(stack(), group)
    peer = nn.parallel.DistributedDataParallel(stack())

    def ours() -> dict[str, Tensor]:
        own.zero_grad()
        (own(x).square().mean() / group.size).backward()
        own.finish()
        return gradients(own)

    def theirs() -> dict[str, Tensor]:
        peer.zero_grad()
        peer(x).square().mean().backward()
        return gradients(peer)

    return ours, theirs


adamw = partial(torch.optim.AdamW, lr=1e-3, eps=1e-3)


def zero1(group: Group) -> Sides:
    x = rows_of(group.rank)
    model = stack()
    own = Zero1(model.parameters(), group, adamw)
    peer = nn.parallel.DistributedDataParallel(stack())
    optimizer = ZeroRedundancyOptimizer(peer.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3, eps=1e-3)

    def ours() -> dict[str, Tensor]:
        (model(x).square().mean() / group.size).backward()
        own.finish()
        own.step()
        return parameters(model)

    def theirs() -> dict[str, Tensor]:
        optimizer.zero_grad()
        peer(x).square().mean().backward()
        optimizer.step()
        return parameters(peer)

    return ours, theirs


def zero3(group: Group) -> Sides:
    x = rows_of(group.rank)
    model, peer = stack(), stack()
    own = Zero3(model, list(model), group, adamw)
    mesh = init_device_mesh("cpu", (group.size,))
    for layer in peer:
        fully_shard(layer, mesh=mesh)
    fully_shard(peer, mesh=mesh)
    optimizer = adamw(peer.parameters())
    first = [True, True]

    def ours() -> dict[str, Tensor]:
        (model(x).square().mean() / group.size).backward()
        own.finish()
        own.step()
        if not first[0]:
            return {}
        first[0] = False
        with own.full_parameters():
            return {name: p.detach().clone() for name, p in parameters(model).items()}

    def theirs() -> dict[str, Tensor]:
        optimizer.zero_grad()
        peer(x).square().mean().backward()
        optimizer.step()
        if not first[1]:
            return {}
        first[1] = False
        return {name: p.full_tensor().detach() for name, p in parameters(peer).items()}

    return ours, theirs


class _FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def tensor_parallel(group: Group) -> Sides:
    torch.manual_seed(0)
    width = 512
    whole = nn.Sequential(*(_FeedForward(width) for _ in range(2)))
    own = nn.Sequential()
    for layer in whole:
        column, row = ColumnParallelLinear(width, 4 * width, group), RowParallelLinear(4 * width, width, group)
        column.load_whole(layer.up.weight, layer.up.bias)
        row.load_whole(layer.down.weight, layer.down.bias)
        own.append(nn.Sequential(column, nn.GELU(), row))
    mesh = init_device_mesh("cpu", (group.size,))
    plan = {
        f"{i}.{name}": style() for i in range(2) for name, style in (("up", ColwiseParallel), ("down", RowwiseParallel))
    }
    peer = parallelize_module(whole, mesh, plan)
    x = torch.randn(8, 64, width, generator=torch.Generator().manual_seed(1))

    def side(module: nn.Module) -> Callable[[], dict[str, Tensor]]:
        def step() -> dict[str, Tensor]:
            module.zero_grad()
            given = x.clone().requires_grad_()
            out = module(given)
            out.square().mean().backward()
            assert given.grad is not None
            return {"out": out, "x": given.grad}

        return step

    return side(own), side(peer)


def cross_entropy(group: Group) -> Sides:
    vocabulary, tokens = 32_000, 512
    torch.manual_seed(0)
    logits = torch.randn(tokens, vocabulary)
    targets = torch.randint(vocabulary, (tokens,))
    mine = logits.chunk(group.size, 1)[group.rank].contiguous()
    mesh = init_device_mesh("cpu", (group.size,))

    def ours() -> dict[str, Tensor]:
        given = mine.clone().requires_grad_()
        loss = cross_entropy_sum(given, targets, group, vocabulary=vocabulary)
        loss.backward()
        assert given.grad is not None
        return {"loss": loss, "gradient": given.grad}

    def theirs() -> dict[str, Tensor]:
        given = mine.clone().requires_grad_()
        with loss_parallel():
            loss = F.cross_entropy(
                DTensor.from_local(given, mesh, [Shard(1)]), _replicated(targets, mesh), reduction="sum"
            )
            loss.backward()
        assert given.grad is not None
        return {"loss": loss.full_tensor() if isinstance(loss, DTensor) else loss, "gradient": given.grad}

    return ours, theirs


def _replicated(tensor: Tensor, mesh: dist.device_mesh.DeviceMesh) -> Tensor:
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


PIPE_WIDTH, MICROBATCHES, PIPE_ROWS, PIPE_DEPTH = 512, 8, 64, 4


def pipeline(group: Group, schedule: Schedule, peer_schedule: Callable[..., object]) -> Sides:
    """Race one schedule; ours and theirs have the same virtual stages."""
    chunks = schedule.chunks
    own = [stage for stage in range(schedule.num_stages) if schedule.rank_of(stage) == group.rank]
    depth = PIPE_DEPTH // chunks
    splits = any(action.kind is Kind.BACKWARD_INPUT for action in schedule.ranks[0])
    linear = SplitLinear if splits else nn.Linear
    modules = {stage: stack(depth, PIPE_WIDTH, linear, seed=stage) for stage in own}
    peers = {stage: stack(depth, PIPE_WIDTH, seed=stage) for stage in own}
    x = rows_of(0, PIPE_ROWS * MICROBATCHES, PIPE_WIDTH)
    target = rows_of(1, PIPE_ROWS * MICROBATCHES, PIPE_WIDTH)
    runtime = Pipeline(schedule, modules, group, shape=(PIPE_ROWS, PIPE_WIDTH), dtype=torch.float32)
    stages = [PipelineStage(peers[s], s, schedule.num_stages, torch.device("cpu")) for s in own]
    takes_all = peer_schedule in {ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble}
    torch_schedule = peer_schedule(stages if takes_all else stages[0], MICROBATCHES, loss_fn=F.mse_loss)
    targets = target.chunk(MICROBATCHES)

    def all_gradients(held: dict[int, nn.Module]) -> dict[str, Tensor]:
        return {f"{stage}.{name}": g for stage, module in held.items() for name, g in gradients(module).items()}

    def ours() -> dict[str, Tensor]:
        for module in modules.values():
            module.zero_grad()
        runtime.step(x.chunk(MICROBATCHES), lambda out, i: F.mse_loss(out, targets[i]) / MICROBATCHES)
        return all_gradients(modules)

    def theirs() -> dict[str, Tensor]:
        for module in peers.values():
            module.zero_grad()
        inputs = (x,) if 0 in own else ()
        torch_schedule.step(*inputs, target=target if schedule.num_stages - 1 in own else None)
        return all_gradients(peers)

    return ours, theirs


def context(group: Group) -> Sides:
    heads, size, length = 8, 64, 1024
    torch.manual_seed(0)
    whole = [torch.randn(1, heads, length, size) for _ in range(4)]
    q, k, v, gradient = (tensor.chunk(group.size, 2)[group.rank].contiguous() for tensor in whole)
    part = length // group.size
    mask = torch.ones(length, length, dtype=torch.bool).tril()[part * group.rank : part * (group.rank + 1)]

    def ours() -> dict[str, Tensor]:
        given = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        out = ring_attention(*given, group, layout=Layout.CONTIGUOUS)
        out.backward(gradient)
        return {"out": out, **{str(i): t.grad for i, t in enumerate(given) if t.grad is not None}}

    def theirs() -> dict[str, Tensor]:
        given = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        keys, values = (_Gathered.apply(tensor, group.size) for tensor in given[1:])
        out = F.scaled_dot_product_attention(given[0], keys, values, attn_mask=mask)
        out.backward(gradient)
        return {"out": out, **{str(i): t.grad for i, t in enumerate(given) if t.grad is not None}}

    return ours, theirs


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, size: int) -> Tensor:
        ctx.size = size
        parts = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(parts, tensor)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous()
        dist.all_reduce(total)
        return total.chunk(ctx.size, 2)[dist.get_rank()].contiguous(), None


def experts(group: Group) -> Sides:
    config = GPTConfig(num_heads=1, width=512, ffn_width=1024, num_experts=4, top_k=2)
    torch.manual_seed(0)
    whole = MoE(config)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.normal_(0, 0.05)
    own = ExpertParallelMoE(whole, config, group, group)
    x = torch.randn(1, 512, 512, generator=torch.Generator().manual_seed(group.rank))

    def side(forward: Callable[[Tensor], Tensor]) -> Callable[[], dict[str, Tensor]]:
        def step() -> dict[str, Tensor]:
            own.zero_grad()
            given = x.clone().requires_grad_()
            out, auxiliary = forward(given)
            (out.square().sum() + auxiliary).backward()
            assert given.grad is not None
            return {"out": out.detach(), "x": given.grad}

        return step

    return side(own), side(partial(_plain_moe, own, group.size))


def _plain_moe(moe: ExpertParallelMoE, size: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The usual way: sort by expert, `all_to_all_single` with its autograd form, loop over experts, and back."""
    tokens = x.flatten(0, -2)
    routing = moe.gate(tokens)
    flat = routing.experts.flatten()
    order = flat.argsort(stable=True)
    leaving = torch.bincount(flat, minlength=moe.config.num_experts)
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving)
    sent, received = (counts.view(size, -1).sum(1).tolist() for counts in (leaving, arriving))
    rows = order // routing.experts.shape[1]
    come = _exchanged(tokens[rows], received, sent)
    of_expert = torch.arange(len(moe.experts)).repeat(size).repeat_interleave(arriving)
    answers = torch.zeros_like(come)
    for number, expert in enumerate(moe.experts):
        places = (of_expert == number).nonzero().squeeze(1)
        answers = answers.index_add(0, places, expert(come[places]))
    back = _exchanged(answers, sent, received)
    weights = routing.weights.flatten()[order].unsqueeze(1)
    out = torch.zeros_like(tokens).index_add(0, rows, back * weights).view_as(x)
    dist.all_reduce(leaving)
    return out, auxiliary_share(routing, leaving, moe.config)


def _exchanged(tensor: Tensor, output_sizes: list[int], input_sizes: list[int]) -> Tensor:
    room = tensor.new_empty(sum(output_sizes), *tensor.shape[1:])
    return torch.distributed.nn.functional.all_to_all_single(room, tensor.contiguous(), output_sizes, input_sizes)


def _piped(make: Callable[[], Schedule], peer: Callable[..., object]) -> Callable[[Group], Sides]:
    return lambda group: pipeline(group, make(), peer)


CASES: dict[str, tuple[str, Callable[[Group], Sides]]] = {
    "DDP": ("DistributedDataParallel", ddp),
    "ZeRO-1": ("ZeroRedundancyOptimizer", zero1),
    "ZeRO-3": ("FSDP2 fully_shard", zero3),
    "tensor parallel": ("parallelize_module", tensor_parallel),
    "vocabulary cross entropy": ("loss_parallel", cross_entropy),
    "GPipe": ("ScheduleGPipe", _piped(lambda: gpipe(2, MICROBATCHES), ScheduleGPipe)),
    "1F1B": ("Schedule1F1B", _piped(lambda: one_forward_one_backward(2, MICROBATCHES), Schedule1F1B)),
    "interleaved 1F1B": (
        "ScheduleInterleaved1F1B",
        _piped(lambda: interleaved_1f1b(2, MICROBATCHES, 2), ScheduleInterleaved1F1B),
    ),
    "zero bubble": (
        "ScheduleInterleavedZeroBubble",
        _piped(lambda: zero_bubble(2, MICROBATCHES), ScheduleInterleavedZeroBubble),
    ),
    "ring attention": ("gathered-KV SDPA", context),
    "experts": ("all_to_all_single MoE", experts),
}
