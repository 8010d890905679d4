"""What a student's ranks may do, from right to hostile."""

import atexit
import contextlib
import ctypes
import os
import signal
import struct
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist


def all_reduce(context, inputs):
    total = inputs["x"].clone()
    dist.all_reduce(total)
    context.values["folder"] = os.getcwd()
    context.values["user"] = os.getuid()
    print("hello from rank", context.rank)
    return {"total": total}


def many_short_collectives(context, inputs):
    total = inputs["x"].clone()
    for _ in range(400):
        dist.broadcast(inputs["x"].clone(), src=0)
        dist.all_reduce(torch.ones(3))
    return {"total": total}


def everything_torch_has(context, inputs):
    rank, size = context.rank, context.world_size
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2, dtype=torch.float64))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(3, 2, dtype=torch.float64)).sum().backward()
    optimizer.step()
    gathered = torch.empty(size)
    dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]))
    scattered = torch.empty(1)
    dist.reduce_scatter_tensor(scattered, torch.arange(float(size)))
    exchanged = torch.empty(size)
    dist.all_to_all_single(exchanged, torch.full((size,), float(rank)))
    pair = dist.new_group([0, 1])
    members = torch.ones(1)
    if rank < 2:
        dist.all_reduce(members, group=pair)
    received = torch.empty(1)
    requests = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.tensor([float(rank)]), (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
    )
    for request in requests:
        request.wait()
    return {"gathered": gathered, "scattered": scattered, "exchanged": exchanged, "received": received}


def count_bytes(context, inputs):
    sent = [context.bytes_sent()]
    dist.all_reduce(inputs["x"].clone())
    sent.append(context.bytes_sent())
    if context.rank == 0:
        dist.send(inputs["x"], 1)
    elif context.rank == 1:
        dist.recv(inputs["x"].clone(), 0)
    sent.append(context.bytes_sent())
    context.values["sent"] = sent
    return {}


def raise_on_rank_1(context, inputs):
    if context.rank == 1:
        _deep_inside()
    dist.recv(torch.empty(3), 1)
    return {}


def _deep_inside():
    raise ValueError("the \x1b[31mbucket\x1b[0m is empty\n::error::no")


def exit_early(context, inputs):
    if context.rank == 1:
        os._exit(0)
    dist.all_reduce(torch.ones(3))
    return {}


def exit_through_system_exit(context, inputs):
    atexit.register(os.write, 4, b"late")
    sys.exit(0)


def kill_itself(context, inputs):
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()
    return {}


def hang(context, inputs):
    if context.rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(0.01)
    dist.all_reduce(torch.ones(3))
    return {}


def receive_from_each_other(context, inputs):
    dist.recv(torch.empty(3), 1 - context.rank)
    return {}


def finish_without_the_other(context, inputs):
    if context.rank == 0:
        dist.recv(torch.empty(3), 1)
    return {}


def disagree(context, inputs):
    if context.rank == 0:
        dist.all_reduce(torch.ones(3))
    else:
        dist.recv(torch.empty(3), 0)
    return {}


def compute_for_long(context, inputs):
    if context.rank == 1:
        time.sleep(2.0)
    dist.barrier()
    return {"x": torch.ones(1)}


def print_much(context, inputs):
    for _ in range(1000):
        print("x" * 100_000, end="")
    os.write(1, b"\xff\xfe the end")
    return {"x": torch.ones(1)}


def write_garbage_everywhere(context, inputs):
    for descriptor in range(1024):
        with contextlib.suppress(OSError):
            os.set_blocking(descriptor, False)
            os.write(descriptor, os.urandom(4096))
    return {"x": torch.ones(1)}


def list_descriptors(context, inputs):
    found = {}
    for descriptor in range(1024):
        try:
            found[descriptor] = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
    context.values["descriptors"] = found
    return {}


def leave_daemons(context, inputs):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(writing, struct.pack("<i", os.getpid()))
            time.sleep(1000)
        os._exit(0)
    context.values["daemon"] = struct.unpack("<i", os.read(reading, 4))[0]
    return {"x": torch.ones(1)}


def hand_back_much(context, inputs):
    return {"x": torch.ones(20 << 20)}


def forge_frame(context, inputs, header_bytes, payload_bytes, status):
    header = b'{"status":"ok"}'
    os.write(4, struct.pack("<4sIQ", b"TIG1", header_bytes or len(header), payload_bytes) + header)
    os._exit(status)


def forge_payload(context, inputs, payload):
    data = bytes.fromhex(payload)
    header = b'{"status":"ok"}'
    os.write(4, struct.pack("<4sIQ", b"TIG1", len(header), len(data)) + header + data)
    os._exit(0)


def forge_setup_error(context, inputs):
    for descriptor in range(5, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"the grader broke")
    os._exit(125)


def write_after_the_result(context, inputs):
    def late():
        while not _is_closed(4):
            time.sleep(0.0001)
        while True:
            with contextlib.suppress(OSError):
                os.write(4, b"late")

    threading.Thread(target=late, daemon=True).start()
    return {"x": torch.ones(1)}


def _is_closed(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return True
    return False


def allocate_without_end(context, inputs):
    if context.rank == 1:
        kept = []
        while True:
            kept.append(torch.ones(8 << 20))
    dist.barrier()
    return {}


def bomb(context, inputs):
    while True:
        try:
            if os.fork() == 0:
                os.setsid()
        except OSError:
            time.sleep(0.001)


def attack_the_agent(context, inputs):
    agent = os.getppid()
    attempts = {
        "signal": lambda: os.kill(agent, signal.SIGKILL),
        "memory": lambda: Path(f"/proc/{agent}/mem").open("r+b").close(),
        "descriptors": lambda: os.listdir(f"/proc/{agent}/fd"),
        "environment": lambda: Path(f"/proc/{agent}/environ").read_bytes(),
        "become root": lambda: os.setresuid(0, 0, 0),
        "other folder": lambda: os.listdir(f"../rank{1 - context.rank}"),
        "beside": lambda: Path("../beside").write_text(""),
        "harness": lambda: Path("../../../harness.py").write_text(""),
        "trace": lambda: _trace(agent),
    }
    worked = []
    for name, attempt in attempts.items():
        try:
            attempt()
        except OSError:
            continue
        worked.append(name)
    context.values["worked"] = worked
    return {}


def _trace(pid):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(16, pid, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")


def leave_files(context, inputs):
    for folder in ("/tmp", "/dev/shm"):
        with open(f"{folder}/left-{os.getpid()}", "w") as file:
            file.write("for the next case")
    context.values["pid"] = os.getpid()
    return {}


def hand_back_other_things(context, inputs, what):
    things = {
        "list": [1.0],
        "list in dict": {"x": [1.0]},
        "sparse": {"x": torch.eye(2).to_sparse()},
        "meta": {"x": torch.empty(2, device="meta")},
        "nan value": {},
    }
    if what == "nan value":
        context.values["x"] = float("nan")
    return things[what]


def hand_back_shared_memory(context, inputs):
    x = torch.arange(6.0).reshape(2, 3)
    return {"x": x, "same": x, "view": x.t(), "parameter": torch.nn.Parameter(x)}
