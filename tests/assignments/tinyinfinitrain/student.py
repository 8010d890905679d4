"""A student in Python: answers every probe in single precision as a right framework would, or with one real mistake.

The files are read by the format's description, not by the code that wrote them.
"""

import re
import struct
from collections.abc import Callable, Mapping
from itertools import count

import torch
from torch import Tensor

from assignments.tinyinfinitrain.tests import model

Inputs = Mapping[str, Tensor | bytes]
Outputs = dict[str, Tensor]
_MAGICS = {20240520: ("H", 2), 20240801: ("I", 4)}


class CrashError(Exception):
    """The student's process ends by a signal or an exit code, after printing a line."""

    def __init__(self, log: str, status: int = -6, kept: Outputs | None = None) -> None:
        super().__init__(log)
        self.log, self.status, self.kept = log, status, kept or {}


class Student:
    """Answers like `submission.probe`.

    Args:
        mistake: Which one of the mistakes below; an empty text for none.
    """

    def __init__(self, mistake: str = "") -> None:
        self.mistake = mistake
        self.printed = b""
        self.arguments: Mapping[str, str | int] = {}
        self.files: dict[str, bytes] = {}

    def probe(self, name: str, inputs: Inputs, arguments: Mapping[str, str | int]) -> dict[str, Tensor]:
        self.arguments = arguments
        self.files = {key: value for key, value in inputs.items() if isinstance(value, bytes)}
        tensors = {key: value for key, value in inputs.items() if isinstance(value, Tensor)}
        answer: Callable[[str, dict[str, Tensor]], Outputs] = getattr(self, str(arguments["probe"]))
        outputs: dict[str, Tensor] = {}
        for case in sorted({key.split("/")[0] for key in tensors}):
            given = {key.split("/", 1)[1]: value for key, value in tensors.items() if key.startswith(f"{case}/")}
            outputs |= {f"{case}/{key}": value for key, value in self._run(answer, case, given).items()}
        return outputs

    def _run(self, answer: Callable[[str, dict[str, Tensor]], Outputs], case: str, given: dict[str, Tensor]) -> Outputs:
        self.printed, log, status = b"", "", 0
        try:
            found = answer(case, given)
        except CrashError as crash:
            found, log, status = dict(crash.kept), crash.log, crash.status
        if self.mistake == "nan":
            found = {k: v * torch.nan if v.is_floating_point() else v for k, v in found.items()}
        if self.mistake == "nothing":
            found = {k: torch.zeros(0) if v.is_floating_point() else v for k, v in found.items()}
        return found | {"status": torch.tensor([status]), "stdout": _text(self.printed), "stderr": _text(log.encode())}

    def neg(self, _: str, given: dict[str, Tensor]) -> Outputs:
        return {"y": -given["x"], "grad_x": given["grad"] if self.mistake == "gradient_not_negated" else -given["grad"]}

    def matmul(self, _: str, given: dict[str, Tensor]) -> Outputs:
        a, b, grad = given["a"], given["b"], given["grad"]
        answer = {"y": a @ b}
        if self.mistake == "backward_takes_two_dimensions" and a.dim() > 2:
            raise CrashError("Check failed: dims.size() == 2 (3 vs. 2)", kept=answer)
        answer |= {"grad_a": grad @ b.transpose(-1, -2), "grad_b": a.transpose(-1, -2) @ grad}
        if self.mistake == "broadcast_overflow":
            answer["grad_b"] = answer["grad_b"].sum(0, keepdim=True).expand_as(answer["grad_b"])
        if self.mistake == "half_precision":
            answer = {key: value.half().float() for key, value in answer.items()}
        place = 0 if self.mistake == "result_on_the_cpu" else int(self.arguments["device"] == "cuda")
        return answer | {f"{key}.on_cuda": torch.tensor([place]) for key in answer}

    def adam(self, _: str, given: dict[str, Tensor]) -> Outputs:
        rate, beta1, beta2, epsilon = given["hyper"]
        answer: Outputs = {}
        for index in count():
            if f"param.{index}" not in given:
                return answer
            value = given[f"param.{index}"].clone()
            first, second = torch.zeros_like(value), torch.zeros_like(value)
            for step, gradient in enumerate(given[f"grad.{index}"], start=1):
                first = beta1 * first + (1 - beta1) * gradient
                second = beta2 * second + (1 - beta2) * gradient * gradient
                mean, square = first / (1 - beta1**step), second / (1 - beta2**step)
                divisor = square.sqrt() + epsilon
                if self.mistake == "epsilon_inside_the_root":
                    divisor = (square + epsilon).sqrt()
                if self.mistake == "epsilon_before_correction":
                    divisor = square.sqrt() + epsilon / (1 - beta2**step).sqrt()
                if self.mistake == "no_bias_correction":
                    mean, divisor = first, second.sqrt() + epsilon
                moves = not (self.mistake == "one_dimension_only" and value.dim() > 1) and self.mistake != "unfilled"
                value = value - rate * mean / divisor if moves else value
                answer[f"param.{index}.{step - 1}"] = value

    def flatten(self, _: str, given: dict[str, Tensor]) -> Outputs:
        start, end = given["range"].tolist()
        if self.mistake == "refuses_negative" and (start < 0 or end < -1):
            raise CrashError("Check failed: start >= 0 (-2 vs. 0)")
        x = given["x"].clone().requires_grad_()
        source = x.transpose(*given["transpose"].tolist()) if "transpose" in given else x
        y = source.flatten(start, end)
        if self.mistake == "middle_takes_the_wrong_dimensions" and start > 0:
            y = y.transpose(0, -1).reshape(y.shape)
        if self.mistake == "ignores_the_transpose" and "transpose" in given:
            y = x.reshape(y.shape)
        return {"y": y.detach(), "grad_x": torch.autograd.grad(y, x, given["grad"])[0]}

    def backward(self, case: str, given: dict[str, Tensor]) -> Outputs:
        leaves = {key: given[key].clone().requires_grad_() for key in ("x", "w") if key in given}
        if self.mistake == "unfilled":
            return {f"grad_{key}": torch.zeros_like(value) for key, value in leaves.items()}
        _run_graph(case, leaves["x"], leaves.get("w"), given, overwrite=self.mistake == "gradient_overwritten")
        return {f"grad_{key}": leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}

    def registered(self, case: str, given: dict[str, Tensor]) -> Outputs:
        if self.mistake == "unregistered" or (self.mistake == "no_matmul_kernel" and "Matmul" in case):
            raise CrashError(f"Check failed: Kernel not found: {case}")
        return {}

    def dispatcher(self, case: str, given: dict[str, Tensor]) -> Outputs:
        (a, b), (c, d) = given["wholes"].tolist(), given["reals"].tolist()
        if self.mistake == "unregistered":
            raise CrashError("Check failed: Kernel not found: ProbeReals")
        first = {"first": torch.tensor([b + (case != "missing_kernel")])}
        match case:
            case "call_values":
                a = a & 0xFFFFFFFF if self.mistake == "truncates" else a
                reals = torch.tensor([given["reals"][0].item() * 2 - d], dtype=torch.float64)
                return {"weighted": torch.tensor([3 * a + 5 * b + 7 * int(c)]), "reals": reals}
            case "call_references":
                dot = (given["a"] * given["b"]).sum().reshape(1)
                return {"accumulated": given["reals"].sum().reshape(1), "dot": dot, "passed": given["a"]}
            case "two_devices":
                other = b + 1000 if self.mistake == "one_device" else b + 2000
                return {"results": torch.tensor([b + 1000, other, b + 1, b + 2])}
            case "duplicate_by_name" if self.mistake == "duplicates_ignored":
                return first
            case "missing_kernel":
                raise CrashError("Check failed: Kernel not found: x", kept=first)
            case _:
                said = "duplicate" if self.mistake == "says_nothing" else "Kernel ALREADY registered: x"
                raise CrashError(f"Check failed: {said}", kept=first)

    def dataset(self, case: str, given: dict[str, Tensor]) -> Outputs:
        data, length = self.files[f"{case}.bin"], int(given["length"])
        magic, version, tokens = struct.unpack_from("<3I", data)
        letter, size = _MAGICS[magic]
        if self.mistake == "type_by_version":
            letter, size = ("H", 2) if version == 7 else ("I", 4)
        if self.mistake == "signed":
            letter = letter.lower()
        available = min(tokens, (len(data) - 1024) // size)
        values = torch.zeros(tokens + length, dtype=torch.int64)
        if self.mistake != "never_copied":
            values[:available] = torch.tensor(struct.unpack_from(f"<{available}{letter}", data, 1024))
        samples = tokens // length if self.mistake == "one_too_many" else (tokens - 1) // length
        samples = tokens // length - 1 if self.mistake == "last_left_out" else samples
        samples *= self.mistake != "unfilled"
        dtype = torch.int32 if self.mistake == "thirty_two_bits" else torch.int64
        shift = 0 if self.mistake == "labels_not_shifted" else 1
        answer: Outputs = {"size": torch.tensor([samples])}
        for i in range(samples):
            start = i * length
            answer[f"x.{i}"] = values[start : start + length].to(dtype)
            answer[f"y.{i}"] = values[start + shift : start + shift + length].to(dtype)
        return answer

    def tokenizer(self, case: str, given: dict[str, Tensor]) -> Outputs:
        table = self._read_tokenizer(self.files[f"{case}.bin"])
        pieces = [table[i] if i < len(table) else b"" for i in given["ids"].tolist()]
        lengths = torch.tensor([len(piece) for piece in pieces])
        return {"text": _text(b"".join(pieces)), "lengths": lengths, "end_token": torch.tensor([50256])}

    def _read_tokenizer(self, data: bytes) -> list[bytes]:
        size = 4 if self.mistake == "four_byte_lengths" else 1
        table, place = [], 1024
        for _ in range(struct.unpack_from("<I", data, 8)[0]):
            length = int.from_bytes(data[place : place + size], "little", signed=self.mistake == "signed_lengths")
            piece = data[place + size : place + size + max(length, 0)]
            place += size + max(length, 0)
            table.append(piece.split(b"\0")[0] if self.mistake == "c_strings" else piece)
        return [] if self.mistake == "unfilled" else table

    def generate(self, case: str, given: dict[str, Tensor]) -> Outputs:
        table, successor = self._read_tokenizer(self.files[f"{case}.bin"]), given["successor"]
        batch, length, text_length = given["sizes"].tolist()
        answer: Outputs = {"piece": torch.tensor([len(table[0]) if table else 0])}
        if not table:
            raise CrashError("uncaught exception: unordered_map::at", status=70, kept=answer)
        x = torch.full((batch, length), 50256)
        x[0, :5] = torch.tensor([464, 3616, 286, 1204, 318])
        self.printed = b"The meaning of life is"
        for calls, place in enumerate(range(5, text_length), start=1):
            answer |= {"calls": torch.tensor([calls]), "fed": x.clone()}
            tokens = successor[x % len(successor)]
            token = tokens[0, place if self.mistake == "wrong_place" else place - 1]
            token = tokens[1, place - 1] if self.mistake == "wrong_row" else token
            self.printed += table[int(token)] + b"\n"
            if self.mistake != "not_fed_back":
                x[0, place] = token
            if self.mistake == "stops_after_one":
                break
        return answer

    def logits(self, _: str, given: dict[str, Tensor]) -> Outputs:
        parameters, shape = self._read_checkpoint()
        if self.mistake == "forward_takes_three_dimensions":
            raise CrashError("linear.cc:25] Check failed: dims.size() == 3")
        answer = model.logits(parameters, given["tokens"], shape).detach()
        if self.mistake == "one_logit":
            answer.view(-1)[17] *= 1.001
        return {"logits": answer}

    def gradients(self, _: str, given: dict[str, Tensor]) -> Outputs:
        parameters, shape = self._read_checkpoint()
        if self.mistake == "backward_takes_two_dimensions":
            raise CrashError("linear.cc:76] Check failed: dims.size() == 2")
        loss, apart = model.gradients(model.as_leaves(parameters, torch.float32), **given, shape=shape)
        untied = self.mistake == "untied"
        found = apart if untied else model.tie(apart)
        if self.mistake == "head_left_out":
            found = apart | {model.HEAD: apart[model.EMBEDDING]}
        if self.mistake == "twice":
            found = {key: 2 * value for key, value in found.items()}
        tied = {"tied": torch.tensor([int(not untied)])}
        return {"loss": loss} | {f"grad.{key}": value for key, value in found.items()} | tied

    def training(self, _: str, given: dict[str, Tensor]) -> Outputs:
        parameters, shape = self._read_checkpoint()
        if self.mistake == "backward_takes_two_dimensions":
            raise CrashError("linear.cc:76] Check failed: dims.size() == 2")
        parameters = model.as_leaves(parameters, torch.float32)
        samples = self.dataset("tokens", given)
        free = [value for key, value in parameters.items() if key not in (model.EMBEDDING, model.HEAD)]
        losses, place = [], count()
        for _step in range(int(given["steps"])):
            if self.mistake != "gradients_kept":
                for value in free:
                    value.grad = None
            for _micro in range(int(given["accumulate"])):
                chosen = [next(place) for _ in range(int(given["batch"]))]
                x, y = (torch.stack([samples[f"{name}.{i}"] for i in chosen]) for name in ("x", "y"))
                loss = model.loss(parameters, x, y, shape)
                torch.autograd.backward(loss)
                losses.append(loss.detach())
            with torch.no_grad():
                for value in free:
                    value.sub_(0.0 if self.mistake == "no_step" else given["learning_rate"] * value.grad)
        trained = {f"param.{key}": value.detach() for key, value in parameters.items()}
        return {"losses": torch.stack(losses)} | trained

    def _read_checkpoint(self) -> tuple[model.Parameters, model.Shape]:
        data = self.files["model.bin"]
        magic, version, block, vocabulary, layers, heads, width, padded = struct.unpack_from("<8I", data)
        assert (magic, version) == (20240326, 3)
        shape = model.Shape(layers, heads, width, vocabulary, padded, block)
        values = torch.frombuffer(bytearray(data[1024:]), dtype=torch.float32)
        sizes: dict[str, tuple[int, ...]] = {"wte": (padded, width), "wpe": (block, width)}
        sizes |= {"ln_1.weight": (width,), "ln_1.bias": (width,)}
        sizes |= {"attn.c_attn.weight": (3 * width, width), "attn.c_attn.bias": (3 * width,)}
        sizes |= {"attn.c_proj.weight": (width, width), "attn.c_proj.bias": (width,)}
        sizes |= {"ln_2.weight": (width,), "ln_2.bias": (width,)}
        sizes |= {"mlp.c_fc.weight": (4 * width, width), "mlp.c_fc.bias": (4 * width,)}
        sizes |= {"mlp.c_proj.weight": (width, 4 * width), "mlp.c_proj.bias": (width,)}
        sizes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
        found, place = {}, 0
        for name, size in sizes.items():
            in_blocks = re.match(r"ln_[12]|attn|mlp", name)
            for layer in range(layers if in_blocks else 1):
                full = f"transformer.h.{layer}.{name}" if in_blocks else f"transformer.{name}"
                number = torch.Size(size).numel()
                found[full] = values[place : place + number].view(size)
                place += number
        assert place == len(values)
        embedding = found.pop("transformer.wte")[:vocabulary]
        found["transformer.wpe.weight"] = found.pop("transformer.wpe")
        heads_own = {model.EMBEDDING: embedding, model.HEAD: embedding, model.HEAD_BIAS: torch.zeros(vocabulary)}
        return found | heads_own, shape


def _text(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def _run_graph(case: str, x: Tensor, w: Tensor | None, given: Mapping[str, Tensor], *, overwrite: bool) -> None:
    """Build and differentiate the graph that the probe of that name describes."""
    once = x.detach() if overwrite else x  # a second use that leaves no gradient
    match case:
        case "square":
            roots = [(x * once, given["grad"])]
        case "diamond":
            assert w is not None
            shared = x * w
            again = shared.detach() if overwrite else shared
            roots = [(shared.sin() + shared * again, given["grad"])]
        case "two_paths":
            roots = [(x * w + x.tanh(), given["grad"])]
        case "two_roots":
            roots = [(x * 2.5, given["grad"]), (x * x, given["grad_second"])]
        case "accumulated":
            roots = [(x * w, given["grad"]), (x * w, given["grad_second"])]
        case "scalar_root":
            roots = [(x * x + x.sin(), torch.ones(()))]
        case "residual_chain":
            y = x
            for _ in range(6):
                y = y + y.tanh()
            roots = [(y, given["grad"])]
        case _:
            raise AssertionError(case)
    for root, gradient in roots:
        torch.autograd.backward(root, gradient)
