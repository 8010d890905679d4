"""One virtual stage of a GPT on one rank: its blocks, with every layer replaced by its parallel form.

Every rank makes the serial model from the same seed and takes its part, so the parts fit together whatever the mesh.
The fused projection of attention has rows [queries; keys; values]: each rank takes its heads of all three, not one
block of rows.

Each parameter is told how it lies on the mesh (`finalize.Layout`), and under which names it is saved (`Piece`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .. import autograd
from ..comm import Groups
from ..context_parallel.layout import Layout as SequenceLayout
from ..context_parallel.layout import positions
from ..context_parallel.ring_attention import ring_attention
from ..expert_parallel.moe import ExpertParallelMoE
from ..finalize import Layout, lay
from ..mesh import DENSE, EXPERT
from ..model import GPT, MLP, Attention, Block, MoE
from ..pipeline_parallel.split_linear import SplitLinear
from ..tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from ..tensor_parallel.vocabulary import VocabularyParallelEmbedding
from .plan import Plan

_Module = TypeVar("_Module", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a parameter under the name that it is saved by.

    Attributes:
        name: In the serial model; the rows of a fused projection have `.q`, `.k`, `.v` after it.
        tensor: This rank's part, a view of the parameter.
        split: The dimension that is split over tensor parallel ranks; None where each holds all of it.
    """

    name: str
    tensor: Tensor
    split: int | None


class Stage(nn.Module):
    """From tokens `[b, s]` (first stage) or activations to activations or local logits `[b, s, V / t]` (last stage).

    Args:
        whole: The serial model; this rank's parts are copied out of it.
        number: Which virtual stage.
        plan: The run.
        groups: The mesh's groups.

    Attributes:
        auxiliary: This rank's auxiliary losses since it was last set to zero: scalar, detached.
    """

    def __init__(self, whole: GPT, number: int, plan: Plan, groups: Groups) -> None:
        super().__init__()
        self.plan, self.groups, self.tensor_group = plan, groups, groups.along("tp")
        self.is_first, self.is_last = number == 0, number == plan.num_stages - 1
        self.layers = plan.layers_of(number)
        self.split_sequence = plan.sequence_parallel and self.tensor_group.size > 1
        context = groups.along("cp")
        self.positions = positions(
            plan.length,
            context.rank,
            context.size,
            SequenceLayout.ZIGZAG if context.size > 1 else SequenceLayout.CONTIGUOUS,
        )
        if self.is_first or self.is_last:
            self.wte = self._embedding(whole)
        if self.is_first:
            self.wpe = _copied(whole.wpe) if whole.wpe is not None else None
        self.blocks = nn.ModuleList(self._block(cast(Block, whole.blocks[layer])) for layer in self.layers)
        if self.is_last:
            self.ln_f = _copied(whole.ln_f)
        self.auxiliary = torch.zeros((), dtype=whole.wte.weight.dtype)
        self._lay()

    def _embedding(self, whole: GPT) -> VocabularyParallelEmbedding:
        rows, width = whole.wte.weight.shape
        made = VocabularyParallelEmbedding(rows, width, self.tensor_group, sequence_parallel=self.split_sequence)
        made.to(whole.wte.weight.dtype).load_whole(whole.wte.weight)
        return made

    def _block(self, serial: Block) -> Block:
        block = _copied(serial)
        block.attention = self._attention(block.attention)
        if isinstance(block.mlp, MoE):
            for expert in block.mlp.experts:
                self._feed_forward(cast(MLP, expert), split_sequence=False)
            block.mlp = ExpertParallelMoE(
                block.mlp,
                self.plan.config,
                self.groups.along("ep"),
                self.groups.along(*DENSE),
                tensor_group=self.tensor_group,
                sequence_parallel=self.split_sequence,
            )
            block.mlp.token_index = self._token_index()
        else:
            self._feed_forward(cast(MLP, block.mlp), split_sequence=self.split_sequence)
        return block

    def _attention(self, attention: Attention) -> Attention:
        group, heads = self.tensor_group, attention.head_size
        parts = (attention.num_heads * heads, attention.num_kv_heads * heads, attention.num_kv_heads * heads)
        if group.size > 1:
            weight, bias = (
                torch.cat([rows.chunk(group.size)[group.rank] for rows in tensor.split(parts)])
                for tensor in (attention.qkv.weight, attention.qkv.bias)
            )
            attention.qkv = self._column(attention.qkv.in_features, sum(parts), weight, bias, self.split_sequence)
            attention.proj = self._row(attention.proj, self.split_sequence)
            attention.num_heads //= group.size
            attention.num_kv_heads //= group.size
        else:
            attention.qkv, attention.proj = _splittable(attention.qkv), _splittable(attention.proj)
        if self.groups.along("cp").size > 1:
            attention.core = partial(ring_attention, group=self.groups.along("cp"))
        return attention

    def _feed_forward(self, mlp: MLP, *, split_sequence: bool) -> None:
        group = self.tensor_group
        if group.size == 1:
            mlp.fc, mlp.proj = _splittable(mlp.fc), _splittable(mlp.proj)
            return
        weight, bias = (tensor.chunk(group.size)[group.rank] for tensor in (mlp.fc.weight, mlp.fc.bias))
        mlp.fc = self._column(mlp.fc.in_features, mlp.fc.out_features, weight, bias, split_sequence)
        mlp.proj = self._row(mlp.proj, split_sequence)

    def _column(self, inputs: int, outputs: int, weight: Tensor, bias: Tensor, split_sequence: bool) -> nn.Module:
        layer = ColumnParallelLinear(inputs, outputs, self.tensor_group, sequence_parallel=split_sequence)
        layer.to(weight.dtype)
        with torch.no_grad():
            layer.weight.copy_(weight)
            cast(Tensor, layer.bias).copy_(bias)
        return layer

    def _row(self, serial: nn.Linear, split_sequence: bool) -> nn.Module:
        layer = RowParallelLinear(
            serial.in_features, serial.out_features, self.tensor_group, sequence_parallel=split_sequence
        )
        layer.to(serial.weight.dtype).load_whole(serial.weight, serial.bias)
        return layer

    def _token_index(self) -> Tensor:
        """Return where this rank's tokens stand in the whole microbatch, read row by row."""
        rows = self.plan.local_shape[0]
        starts = (torch.arange(rows) + self.plan.first_row(self.groups.coordinates)) * self.plan.length
        return (starts[:, None] + self.positions).flatten()

    def forward(self, value: Tensor) -> Tensor:
        """Run the stage; auxiliary losses join the graph, and their values add up in `auxiliary`."""
        x = self._embed(value) if self.is_first else value
        for block in self.blocks:
            x, share = (
                checkpoint(block, x, self.positions, use_reentrant=False)
                if self.plan.recompute
                else block(x, self.positions)
            )
            if share.requires_grad:
                share = share / self.plan.microbatches
                self.auxiliary += share.detach()
                x = _Attach.apply(x, share)
        return self._head(x) if self.is_last else x

    def _embed(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.wte(tokens)
        if self.wpe is not None:
            own = self.positions.chunk(self.tensor_group.size)[self.tensor_group.rank]
            x = x + self.wpe(own if self.split_sequence else self.positions)
        return x

    def _head(self, x: Tensor) -> Tensor:
        x = self.ln_f(x)
        group = self.tensor_group
        x = autograd.all_gather(x, group, 1) if self.split_sequence else autograd.copy(x, group)
        return F.linear(x, self.wte.weight)

    def _lay(self) -> None:
        """Note how every parameter lies on the mesh."""
        for name, parameter in self.named_parameters():
            lay(parameter, self._layout(name))

    def _layout(self, name: str) -> Layout:
        split = self.split_of(name) is not None
        if name.startswith("wte"):
            stages = self.groups.along("pp").size
            shared = stages > 1 and not (self.is_first and self.is_last) and self.plan.schedule != "dual_pipe_v"
            return Layout(DENSE, ("tp",), tied=shared)
        partial_sums = EXPERT if ".experts." in name else DENSE
        if self.split_sequence and not split and ".mlp.gate" not in name and ".experts." not in name:
            partial_sums = ("tp", *partial_sums)
        sharded = (*(("tp",) if split else ()), *(("ep",) if ".experts." in name else ()), "pp")
        return Layout(partial_sums, sharded)

    def split_of(self, name: str) -> int | None:
        """Return the dimension along which tensor parallel ranks split a parameter, or None."""
        if name.startswith("wte") or name.endswith((".qkv.weight", ".qkv.bias", ".fc.weight", ".fc.bias")):
            return 0
        return 1 if name.endswith(".proj.weight") else None

    def cut(self, name: str, tensor: Tensor) -> Iterator[Piece]:
        """Return the pieces of a tensor shaped as the parameter `name`: itself, its gradient, an optimizer's state."""
        split, saved = self.split_of(name), self.saved_name(name)
        if ".qkv." not in name:
            yield Piece(saved, tensor, split)
            return
        attention = cast(Attention, cast(Block, self.blocks[int(name.split(".")[1])]).attention)
        sizes = [heads * attention.head_size for heads in (attention.num_heads, *[attention.num_kv_heads] * 2)]
        for letter, rows in zip("qkv", tensor.split(sizes), strict=True):
            yield Piece(f"{saved}.{letter}", rows, split)

    def saved_name(self, name: str) -> str:
        """Return the serial model's name of a parameter: blocks and experts are counted from the model's first."""
        words = name.split(".")
        if words[0] == "blocks":
            words[1] = str(self.layers[int(words[1])])
        if "experts" in words:
            place = words.index("experts") + 1
            moe = cast(ExpertParallelMoE, cast(Block, self.blocks[int(name.split(".")[1])]).mlp)
            words[place] = str(moe.first + int(words[place]))
        return ".".join(words)


class _Attach(torch.autograd.Function):
    """Makes a loss part of the graph of `x`: whoever calls backward on what comes of `x` gets its gradient too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = share.shape, share.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones(ctx.shape, dtype=ctx.dtype, device=gradient.device)


def _splittable(serial: nn.Linear) -> SplitLinear:
    """Return the same layer with a backward that zero-bubble schedules can split."""
    layer = SplitLinear(serial.in_features, serial.out_features, dtype=serial.weight.dtype)
    layer.weight, layer.bias = serial.weight, serial.bias
    return layer


def _copied(serial: _Module) -> _Module:
    """Copy a module, so that several stages and tests can take theirs from one serial model."""
    return copy.deepcopy(serial)
