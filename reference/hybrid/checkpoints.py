"""Save a run, and go on with it on another mesh: torch's distributed checkpoint does the resharding.

Everything is saved under the serial model's names, whatever the mesh: a tensor parallel part as a `DTensor`, the rows
of a fused projection as queries, keys and values, the optimizer's states beside the parameters that they belong to.
With ZeRO, the flat shards of states are gathered and cut into parameters first. So a run that was saved at tp 2, pp 2,
dp 2 goes on at tp 4, dp 2: each rank reads the parts that it now holds.

Bytes sent per rank: none but, with ZeRO, (p-1)/p of the states. Memory: with ZeRO, the states of this rank's parameters
once more. torch.distributed.checkpoint reads and writes tensors alone; it unpickles only its own index file, which is
why a checkpoint must be your own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from .. import comm
from ..data_parallel.buckets import views_of
from ..data_parallel.zero1 import Zero1
from .stage import Piece
from .trainer import Trainer

_STEP = "step"
State = dict[str, Tensor]
"""The optimizer's state of one parameter, by torch's names: `exp_avg`, `momentum_buffer`, `step`, ..."""


def folder_of(runs: Path, step: int) -> Path:
    """Return where the checkpoint after `step` steps lies: one is never written over another."""
    return runs / f"step-{step:09d}"


def latest(runs: Path) -> Path | None:
    """Return the latest whole checkpoint below `runs`; the index file is written last, so a broken one has none."""
    return max((path.parent for path in runs.glob("step-*/.metadata")), default=None)


def save(trainer: Trainer, folder: Path, step: int) -> None:
    """Write the run after `step` steps; all ranks call it together."""
    states = _gathered_states(trainer)
    tensors = _tensors(trainer, states)
    tensors[_STEP] = torch.tensor(step)
    dcp.save(tensors, checkpoint_id=str(folder), no_dist=not dist.is_initialized())


def load(trainer: Trainer, folder: Path) -> int:
    """Read what `save` wrote, from whatever mesh, into a trainer that has taken no step; return how many were taken.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: It was written by another model or optimizer.
    """
    saved = set(dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata)
    states = {parameter: _empty_state(trainer, name, parameter, saved) for name, parameter in _named(trainer)}
    tensors = _tensors(trainer, states)
    tensors[_STEP] = torch.tensor(0)
    missing = sorted(set(tensors) - saved)
    if missing:
        raise ValueError(f"the checkpoint {folder} lacks {len(missing)} tensors of this model, first {missing[0]}")
    dcp.load(tensors, checkpoint_id=str(folder), no_dist=not dist.is_initialized())
    _publish(trainer)
    _hand_out_states(trainer, states)
    return int(tensors[_STEP])


def _named(trainer: Trainer) -> Iterator[tuple[str, Parameter]]:
    for stage in trainer.stages.values():
        yield from stage.named_parameters()


def _tensors(trainer: Trainer, states: dict[Parameter, State]) -> dict[str, Tensor]:
    """Name this rank's parameters and states as the serial model does; the tensors are views, to write to as well."""
    group = trainer.groups.along("tp")
    device = trainer.parameters[0].device.type
    mesh = None
    if group.size > 1:  # tp is the innermost axis of the layout, so its ranks are neighbours
        ranks = torch.arange(trainer.plan.mesh.world_size).view(-1, group.size)
        mesh = DeviceMesh(device, ranks, mesh_dim_names=("others", "tp"))["tp"]
    found: dict[str, Tensor] = {}
    for stage in trainer.stages.values():
        for name, parameter in stage.named_parameters():
            for piece in stage.cut(name, parameter.detach()):
                found[f"model.{piece.name}"] = _spread(piece, mesh)
            for key, state in states[parameter].items():
                if state.dim() == 0:
                    found[f"optimizer.{key}.{stage.saved_name(name)}"] = state
                    continue
                for piece in stage.cut(name, state):
                    found[f"optimizer.{key}.{piece.name}"] = _spread(piece, mesh)
    return found


def _spread(piece: Piece, mesh: DeviceMesh | None) -> Tensor:
    if mesh is None or piece.split is None:
        return piece.tensor
    return DTensor.from_local(piece.tensor, mesh, [Shard(piece.split)], run_check=False)


def _gathered_states(trainer: Trainer) -> dict[Parameter, State]:
    """Return each parameter's whole state on this rank, copied out of ZeRO's shards where there are any."""
    if not trainer.plan.zero:
        states = trainer.optimizers[0].state
        return {parameter: _tensors_of(states[parameter]) for parameter in trainer.parameters}
    found: dict[Parameter, State] = {parameter: {} for parameter in trainer.parameters}
    for reducer in trainer.reducers:
        assert isinstance(reducer, Zero1)
        for bucket in reducer.buckets:
            for key, part in _tensors_of(reducer.optimizer.inner.state[reducer.shard_of[bucket].master]).items():
                whole = comm.all_gather(part, reducer.group) if part.dim() else part
                views = views_of(whole, bucket.parameters) if part.dim() else [part] * len(bucket.parameters)
                for parameter, view in zip(bucket.parameters, views, strict=True):
                    found[parameter][key] = view
    return found


def _tensors_of(state: dict[str, object]) -> State:
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def _empty_state(trainer: Trainer, name: str, parameter: Parameter, saved: set[str]) -> State:
    """Return room for every state of a parameter that the checkpoint holds."""
    stage = next(stage for stage in trainer.stages.values() if any(p is parameter for p in stage.parameters()))
    whole, pieces = stage.saved_name(name), list(stage.cut(name, parameter.detach()))
    found: State = {}
    for key in sorted({entry.split(".")[1] for entry in saved if entry.startswith("optimizer.")}):
        if f"optimizer.{key}.{pieces[0].name}" in saved and pieces[0].name != whole:
            found[key] = torch.zeros_like(parameter)
        elif f"optimizer.{key}.{whole}" in saved:
            found[key] = torch.zeros(()) if key == _STEP else torch.zeros_like(parameter)
    return found


@torch.no_grad()
def _publish(trainer: Trainer) -> None:
    """Let ZeRO's shards follow the parameters, of which they are views or wider copies."""
    for reducer in trainer.reducers:
        if isinstance(reducer, Zero1):
            for shard in reducer.shards:
                if shard.master.dtype != shard.own.dtype:
                    shard.master.copy_(shard.own)


def _hand_out_states(trainer: Trainer, states: dict[Parameter, State]) -> None:
    """Give the optimizer what was read, with ZeRO only this rank's part of it."""
    if not trainer.plan.zero:
        for parameter, state in states.items():
            trainer.optimizers[0].state[parameter].update(state)
        return
    for reducer in trainer.reducers:
        assert isinstance(reducer, Zero1)
        for bucket in reducer.buckets:
            shard = reducer.shard_of[bucket]
            for key, first in states[bucket.parameters[0]].items():
                part = first if first.dim() == 0 else _own_part(reducer, bucket.parameters, states, key, shard.master)
                reducer.optimizer.inner.state[shard.master][key] = part


def _own_part(
    reducer: Zero1, parameters: list[Parameter], states: dict[Parameter, State], key: str, master: Parameter
) -> Tensor:
    flat = master.new_zeros(master.numel() * reducer.group.size)
    for parameter, view in zip(parameters, views_of(flat, parameters), strict=True):
        view.copy_(states[parameter][key])
    return flat.view(reducer.group.size, -1)[reducer.group.rank].clone()
