"""Train a byte-level GPT on text, on any mesh.

    torchrun --nproc-per-node 8 -m reference.hybrid.train --tp 2 --pp 2 --dp 2

The same program on one process (`python -m reference.hybrid.train`) is serial training, and prints the same losses:
the model depends on the seed alone, and the text of a step on the step alone. With `--checkpoint` it saves, and goes
on from what it finds there, on whatever mesh it is started next.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import comm
from ..comm import Groups
from ..mesh import LAYOUT, Mesh
from ..model import GPT, GPTConfig
from . import checkpoints
from .plan import Plan
from .trainer import EVERYBODY_WITH_A_SHARE, Trainer, share

BYTES = 256


def text_of(path: Path) -> Tensor:
    """Return the bytes of a file, or of every Python file below a folder, as tokens: int64 `[n]`."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def batch_of(text: Tensor, plan: Plan, step: int) -> list[tuple[Tensor, Tensor]]:
    """Return tokens and targets `[sequences, length]` of each microbatch; a function of the step alone."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - plan.length - 1, (plan.microbatches, plan.sequences), generator=generator)
    windows = text[starts[..., None] + torch.arange(plan.length + 1)]
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in windows]


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="reference.hybrid.train", description="Train a byte-level GPT on a mesh.")
    for axis in LAYOUT:
        parser.add_argument(f"--{axis}", type=int, default=1, help=f"size of the mesh axis {axis}")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1], help="a file, or a folder of Python")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--sequences", type=int, default=8, help="of a microbatch, on all ranks together")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--zero", type=int, default=0, choices=(0, 1, 2))
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64", "bfloat16"))
    parser.add_argument("--checkpoint", type=Path, help="a folder; training goes on from the latest in it")
    parser.add_argument("--every", type=int, default=10, help="save after so many steps")
    return parser.parse_args(given)


def plan_of(options: argparse.Namespace) -> Plan:
    """Return what the command line asks for.

    Raises:
        ValueError: It cannot be run.
    """
    config = GPTConfig(
        vocab_size=BYTES,
        max_positions=options.length,
        num_layers=options.layers,
        num_heads=options.heads,
        width=options.width,
        num_experts=options.experts,
        expert_every=2,
        capacity_factor=1.25 if options.experts else 0.0,
    )
    return Plan(
        config,
        Mesh(**{axis: getattr(options, axis) for axis in LAYOUT}),
        options.sequences,
        options.length,
        options.microbatches,
        schedule=options.schedule,
        zero=options.zero,
        sequence_parallel=options.sequence_parallel,
        recompute=options.recompute,
    )


def train(options: argparse.Namespace) -> None:
    """Train, and print loss and norm of every step on rank 0."""
    plan = plan_of(options)
    groups = Groups(plan.mesh, extra=[EVERYBODY_WITH_A_SHARE])
    text = text_of(options.text)

    def optimizer(parameters: list[Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=options.learning_rate, weight_decay=0.1)

    trainer = Trainer(GPT(plan.config).to(getattr(torch, options.dtype)), plan, groups, optimizer)
    done, saved = 0, checkpoints.latest(options.checkpoint) if options.checkpoint is not None else None
    if saved is not None:
        done = checkpoints.load(trainer, saved)
        _say(groups, f"goes on after step {done} from {saved}")
    for step in range(done, options.steps):
        batch = [(share(a, plan, groups), share(b, plan, groups)) for a, b in batch_of(text, plan, step)]
        result = trainer.step(batch, options.max_norm)
        _say(groups, f"step {step + 1:>4}  loss {float(result.loss):.9f}  norm {float(result.norm):.9f}")
        if options.checkpoint is not None and (step + 1) % options.every == 0:
            checkpoints.save(trainer, checkpoints.folder_of(options.checkpoint, step + 1), step + 1)


def _say(groups: Groups, line: str) -> None:
    if groups.rank == 0:
        print(line, flush=True)


def main() -> None:
    """Join the world that `torchrun` describes, or be alone, and train."""
    options = arguments()
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        comm.start("gloo")  # the model lies on CPUs, also where there are GPUs
    try:
        train(options)
    except ValueError as error:
        raise SystemExit(f"this cannot be trained: {error}") from error
    finally:
        comm.stop()


if __name__ == "__main__":
    main()
