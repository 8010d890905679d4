"""What a hybrid run is asked for, checked before any rank starts to work.

Nothing here communicates or holds a tensor, so an impossible plan fails at once, with its numbers, on every rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..mesh import Mesh
from ..model import GPTConfig
from ..pipeline_parallel.actions import Schedule
from ..pipeline_parallel.dual_pipe_v import dual_pipe_v
from ..pipeline_parallel.gpipe import gpipe
from ..pipeline_parallel.interleaved import interleaved_1f1b
from ..pipeline_parallel.one_forward_one_backward import one_forward_one_backward
from ..pipeline_parallel.zero_bubble import zero_bubble

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "dual_pipe_v"]


@dataclass(frozen=True, slots=True)
class Plan:
    """How one model is trained on one mesh.

    Attributes:
        config: The model.
        mesh: Sizes of the axes.
        sequences: Sequences of one microbatch, on all ranks together.
        length: Tokens of a sequence.
        microbatches: Of one step.
        schedule: The pipeline's.
        chunks: Virtual stages a rank, for the interleaved schedule.
        zero: 0 for plain data parallelism; 1 or 2 to shard optimizer states, or gradients too, over the data axes.
        sequence_parallel: Split norms and dropout along the sequence over the tensor parallel ranks.
        recompute: Keep only each block's input, and compute its inside again in the backward.

    Raises:
        ValueError: Something does not divide, or a schedule cannot run.
    """

    config: GPTConfig
    mesh: Mesh = field(default_factory=Mesh)
    sequences: int = 8
    length: int = 64
    microbatches: int = 1
    schedule: ScheduleName = "1f1b"
    chunks: int = 2
    zero: Literal[0, 1, 2] = 0
    sequence_parallel: bool = False
    recompute: bool = False

    def __post_init__(self) -> None:
        config, mesh = self.config, self.mesh
        _require_divides(config.num_heads, mesh.tp, "query heads", "tensor parallel ranks")
        _require_divides(config.kv_heads, mesh.tp, "key and value heads", "tensor parallel ranks")
        _require_divides(config.hidden, mesh.tp, "hidden features", "tensor parallel ranks")
        _require_divides(config.embedding_rows, mesh.tp, "rows of the embedding (pad them)", "tensor parallel ranks")
        _require_divides(self.sequences, mesh.size("dp", "ep"), "sequences of a microbatch", "data ranks (dp x ep)")
        if mesh.ep > 1 and not config.num_experts:
            raise ValueError(f"mesh axis ep has size {mesh.ep}, but the model has no experts")
        if config.num_experts:
            _require_divides(config.num_experts, mesh.ep, "experts", "expert parallel ranks")
        if mesh.cp > 1:
            _require_divides(self.length, 2 * mesh.cp, "tokens of a sequence", "zigzag parts (2 cp)")
        if self.sequence_parallel:
            _require_divides(self.length // mesh.cp, mesh.tp, "tokens of a context rank", "tensor parallel ranks")
        if config.num_layers < self.num_stages:
            raise ValueError(f"{config.num_layers} layers are too few for {self.num_stages} pipeline stages")
        if self.zero not in (0, 1, 2):
            raise ValueError(f"ZeRO stage {self.zero} is not 0, 1 or 2; stage 3 works alone, see data_parallel.zero3")
        self.make_schedule()

    @property
    def num_stages(self) -> int:
        """Virtual stages of the whole pipeline."""
        return self.mesh.pp * {"interleaved": self.chunks, "dual_pipe_v": 2}.get(self.schedule, 1)

    @property
    def local_shape(self) -> tuple[int, int]:
        """Sequences and tokens of one rank's part of a microbatch, before any split over tensor parallel ranks."""
        return self.sequences // self.mesh.size("dp", "ep"), self.length // self.mesh.cp

    def first_row(self, coordinates: Mapping[str, int]) -> int:
        """Return which sequence of a microbatch is the first of the rank that stands at `coordinates`."""
        return self.local_shape[0] * (coordinates["dp"] * self.mesh.ep + coordinates["ep"])

    def make_schedule(self) -> Schedule:
        """Return the pipeline's schedule."""
        stages, microbatches = self.mesh.pp, self.microbatches
        if self.schedule == "gpipe":
            return gpipe(stages, microbatches)
        if self.schedule == "1f1b":
            return one_forward_one_backward(stages, microbatches)
        if self.schedule == "interleaved":
            return interleaved_1f1b(stages, microbatches, self.chunks)
        if self.schedule == "zero_bubble":
            return zero_bubble(stages, microbatches)
        if self.schedule == "dual_pipe_v":
            return dual_pipe_v(stages, microbatches)
        raise ValueError(f"there is no schedule {self.schedule!r}")

    def layers_of(self, stage: int) -> range:
        """Return the blocks of a virtual stage; where they do not divide, earlier stages have one more."""
        each, more = divmod(self.config.num_layers, self.num_stages)
        first = stage * each + min(stage, more)
        return range(first, first + each + (stage < more))


def _require_divides(size: int, parts: int, what: str, over: str) -> None:
    if size % parts:
        raise ValueError(f"{size} {what} do not divide by {parts} {over}")
