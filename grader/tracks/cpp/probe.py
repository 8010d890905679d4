"""Runs one probe: tensors and files in, tensors out, by files in a private folder, never on the program's streams."""

from collections.abc import Mapping
from pathlib import PurePosixPath

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from grader.errors import InfrastructureError
from grader.sandbox.base import MEBIBYTE
from grader.tracks.agent import AgentClient, Command, CommandFinished, ProgramLimits, SubmissionFailure

INPUTS, OUTPUTS = "inputs.safetensors", "outputs.safetensors"
# What the framework's tensors can be; on anything else torch itself may refuse to work.
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
_LOG_CHARACTERS = 2_000
_RESERVED = frozenset({INPUTS, OUTPUTS})


def program(name: str) -> str:
    """Return the build's target of a probe."""
    return f"probe_{name}"


def run_probe(
    client: AgentClient,
    name: str,
    inputs: Mapping[str, Tensor | bytes],
    arguments: Mapping[str, str | int],
    *,
    folder: str = "bin",
    timeout_s: float = 60.0,
    limits: ProgramLimits | None = None,
    max_output_bytes: int = 64 * MEBIBYTE,
) -> dict[str, Tensor]:
    """Run the program `probe_<name>` on inputs of our choice and return what it computed.

    Args:
        client: The agent of the sandbox that holds the programs.
        name: The probe's name: a file of the assignment's `probes/`, without its suffix.
        inputs: Tensors go into `inputs.safetensors` by name; bytes become files of that plain name.
        arguments: Given on the command line as `key=value`, after the folder.
        folder: Where the programs lie, below the sandbox's root.
        timeout_s: Wall time of the whole program.
        limits: What it may use.
        max_output_bytes: The most that it may hand back.

    Raises:
        SubmissionFailure: It crashed, ran out of time, ended without outputs, or its outputs are no safetensors.
        InfrastructureError: An input's name is no plain file name, or the sandbox failed.
    """
    path = PurePosixPath(client.sandbox.root) / folder / program(name)
    words = [f"{key}={value}" for key, value in arguments.items()]
    command = Command(
        argv=[str(path), "{case}", *words],
        timeout_s=timeout_s,
        limits=limits or ProgramLimits(),
        inputs=pack(inputs),
        outputs=(OUTPUTS,),
        max_output_bytes=max_output_bytes,
    )
    finished = client.run_command(command)
    return unpack(name, finished)


def pack(inputs: Mapping[str, Tensor | bytes]) -> dict[str, bytes]:
    """Return the files that hold the inputs.

    Raises:
        InfrastructureError: A file's name is a path, or is one that the protocol uses itself.
    """
    files = {name: value for name, value in inputs.items() if isinstance(value, bytes)}
    wrong = [name for name in files if not name or name in _RESERVED or PurePosixPath(name).name != name]
    if wrong:
        raise InfrastructureError(f"a probe's input file is called {wrong[0]!r}, expected a plain name of its own")
    tensors = {name: _alone(value) for name, value in inputs.items() if isinstance(value, Tensor)}
    return {INPUTS: safetensors.torch.save(tensors), **files}


def _alone(tensor: Tensor) -> Tensor:
    """Return a copy with memory of its own: the format holds no two tensors that share any."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def unpack(name: str, finished: CommandFinished) -> dict[str, Tensor]:
    """Return what a finished probe handed back.

    Raises:
        SubmissionFailure: It did not come to its end, or left nothing that can be read. An exit code is the student's
            to choose, so that none of them means that we failed.
    """
    _require_end(name, finished)
    payload = finished.outputs.get(OUTPUTS)
    if payload is None:
        reason = finished.refused.get(OUTPUTS, "there are none")
        raise _failure("failed", f"the probe {name} ended without outputs: {reason}", finished)
    try:
        outputs = dict(safetensors.torch.load(payload))
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        message = f"the outputs of the probe {name} are no safetensors: {error}"
        raise _failure("failed", message, finished) from error
    odd = sorted({str(tensor.dtype) for tensor in outputs.values()} - {str(dtype) for dtype in DTYPES})
    if odd:
        raise _failure(
            "failed", f"the outputs of the probe {name} hold {odd[0]}, which no framework's tensor has", finished
        )
    return outputs


def _require_end(name: str, finished: CommandFinished) -> None:
    if finished.out_of_memory:
        raise _failure("out_of_memory", f"the probe {name} used up its memory", finished)
    if finished.ending == "timeout":
        raise _failure("timeout", f"the probe {name} did not end within its time", finished)
    if finished.ending == "killed":
        raise _failure("crashed", f"the probe {name} was ended by signal {-(finished.exit_code or 0)}", finished)
    if finished.exit_code != 0:
        raise _failure("crashed", f"the probe {name} ended with exit code {finished.exit_code}", finished)


def _failure(status: str, message: str, finished: CommandFinished) -> SubmissionFailure:
    return SubmissionFailure(status, message, {"log": finished.stderr[-_LOG_CHARACTERS:]})
