"""The data set, the tokenizer and text generation, on files that we write."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from assignments.tinyinfinitrain.tests import cases, formats, tasks
from assignments.tinyinfinitrain.tests.cases import Outcome, Submission
from grader.judge.failure import CheckFailure, require
from grader.judge.outcome import Ended
from grader.record import CheckStatus

# tokens in the file, sequence length, the file's kind, and the first number that is no token
DATASETS = {
    "sixteen_bits": (100, 8, formats.TOKENS_16_BIT, 50257),
    "thirty_two_bits": (257, 16, formats.TOKENS_32_BIT, 128256),
    "divisible": (1024, 64, formats.TOKENS_16_BIT, 50257),
}
PROMPT = (464, 3616, 286, 1204, 318)  # "The meaning of life is", as the framework gives it
PROMPT_TEXT = b"The meaning of life is"


@pytest.mark.check(item="gpt2", id="probe/dataset")
@pytest.mark.check(item="gpt2", id="probe/dataset_cuda")
def test_every_sample_of_a_token_file(submission: Submission, generator: torch.Generator) -> None:
    """Sample i starts at token i times the length; its labels are shifted by one; both are int64."""
    tokens = {
        case: torch.randint(0, limit, (count,), generator=generator) for case, (count, _, _, limit) in DATASETS.items()
    }
    files = {f"{case}.bin": formats.token_file(tokens[case], kind) for case, (_, _, kind, _) in DATASETS.items()}
    inputs = {case: {"length": torch.tensor([length])} for case, (_, length, _, _) in DATASETS.items()}
    outcomes = cases.run(submission, "text", "dataset", inputs, files=files)
    cases.judge_each(submission, tasks.DATASET, outcomes, lambda outcome: _judge_dataset(outcome, tokens))


def _judge_dataset(outcome: Outcome, tokens: dict[str, Tensor]) -> None:
    """The last sample may be left out, where its last label would be the file's very last token."""
    count, length, *_ = DATASETS[outcome.case]
    size = outcome.number("size")
    if size == 0:
        raise cases.unfilled(tasks.DATASET, f"case {outcome.case} has no samples")
    sizes = sorted({count // length - 1, (count - 1) // length})
    wanted = " or ".join(map(str, sizes))
    require(size in sizes, f"case {outcome.case}: Size() is {size}, expected {wanted}", {"tokens": count})
    for sample in range(size or 0):
        for name, shift in (("x", 0), ("y", 1)):
            start = sample * length + shift
            _require_tokens(outcome, f"{name}.{sample}", tokens[outcome.case][start : start + length])


def _require_tokens(outcome: Outcome, name: str, expected: Tensor) -> None:
    found = outcome.get(name)
    label = f"case {outcome.case}, {name.replace('.', ' of sample ')}"
    if found is None:
        raise CheckFailure(f"{label} did not come back", {"tensor": name})
    require(found.dtype == torch.int64, f"{label} has dtype {found.dtype}, expected torch.int64", {"tensor": name})
    require(
        found.shape == expected.shape,
        f"{label} has shape {tuple(found.shape)}, expected {tuple(expected.shape)}",
        {"tensor": name},
    )
    if not torch.equal(found, expected):
        place = int((found != expected).nonzero()[0])
        got, wanted = int(found[place]), int(expected[place])
        details = {"tensor": name, "worst_index": [place], "got": got, "expected": wanted}
        raise CheckFailure(f"{label}: token {place} is {got}, expected {wanted}", details)


def draw_pieces(generator: torch.Generator) -> dict[str, list[bytes]]:
    """Return two vocabularies: short words, and all single bytes with words of up to 255 bytes."""

    def word(length: int) -> bytes:
        return bytes(torch.randint(0, 256, (length,), generator=generator).tolist())

    short = [word(int(torch.randint(1, 12, (), generator=generator))) for _ in range(48)]
    every_byte = [bytes([value]) for value in range(256)]
    return {"version_1": short, "version_2": every_byte + [word(length) for length in (2, 31, 128, 200, 255, 5)]}


@pytest.mark.check(item="gpt2", id="probe/tokenizer")
@pytest.mark.check(item="gpt2", id="probe/tokenizer_cuda")
def test_every_token_decodes_to_its_bytes(submission: Submission, generator: torch.Generator) -> None:
    """Both versions of the file, any bytes, every length that one byte can hold, in any order."""
    pieces = draw_pieces(generator)
    files = {
        f"{case}.bin": formats.tokenizer_file(pieces[case], version)
        for version, case in enumerate(("version_1", "version_2"), start=1)
    }
    inputs = {case: {"ids": torch.randperm(len(table), generator=generator)} for case, table in pieces.items()}

    def judge(outcome: Outcome) -> None:
        ids = inputs[outcome.case]["ids"].tolist()
        found = _decoded(outcome)
        if not any(found):
            raise cases.unfilled(tasks.TOKENIZER, f"case {outcome.case} decodes every token to nothing")
        require(len(found) == len(ids), f"case {outcome.case}: {len(found)} of {len(ids)} tokens were decoded")
        _require_pieces(outcome.case, ids, found, [pieces[outcome.case][i] for i in ids])
        end = outcome.number("end_token")
        require(
            end == formats.END_OF_TEXT,
            f"case {outcome.case}: GetEndToken() is {end}, expected {formats.END_OF_TEXT}",
        )

    outcomes = cases.run(submission, "text", "tokenizer", inputs, files=files)
    cases.judge_each(submission, tasks.TOKENIZER, outcomes, judge)


def _decoded(outcome: Outcome) -> list[bytes]:
    lengths = outcome.get("lengths")
    if lengths is None or lengths.dtype != torch.int64 or lengths.dim() != 1:
        return []
    data, found, start = cases.bytes_of(outcome, "text"), [], 0
    for length in lengths.tolist():
        found.append(data[start : start + length])
        start += length
    return found


def _require_pieces(case: str, ids: Sequence[int], found: Sequence[bytes], expected: Sequence[bytes]) -> None:
    wrong = [place for place in range(len(ids)) if found[place] != expected[place]]
    if wrong:
        first = wrong[0]
        message = (
            f"case {case}: Decode({ids[first]}) gives {found[first][:40]!r} ({len(found[first])} bytes), "
            f"expected {expected[first][:40]!r} ({len(expected[first])} bytes); {len(wrong)} of {len(ids)} are wrong"
        )
        raise CheckFailure(message, {"token": ids[first], "wrong": len(wrong), "decoded": len(ids)})


VOCABULARY, BATCH, LENGTH, TEXT_LENGTH = 50, 2, 16, 14
GENERATED = TEXT_LENGTH - len(PROMPT)


def draw_successor(generator: torch.Generator) -> Tensor:
    """Return (VOCABULARY,) int64: each token's successor, all tokens in one cycle."""
    order = torch.randperm(VOCABULARY, generator=generator)
    successor = torch.empty_like(order)
    successor[order] = order.roll(-1)
    return successor


def generated_tokens(successor: Tensor) -> list[int]:
    """Return the tokens that follow the prompt. The model sees tokens modulo the vocabulary."""
    tokens, last = [], PROMPT[-1] % VOCABULARY
    for _ in range(GENERATED):
        last = int(successor[last])
        tokens.append(last)
    return tokens


@pytest.mark.check(item="gpt2", id="probe/generate")
@pytest.mark.check(item="gpt2", id="probe/generate_cuda")
def test_generation_feeds_back_what_it_samples(submission: Submission, generator: torch.Generator, device: str) -> None:
    """The model is ours, and certain of the next token, so that neither the random state nor its seed matters."""
    successor = draw_successor(generator)
    pieces = [f"<{chr(ord('a') + i // 26)}{chr(ord('a') + i % 26)}>".encode() for i in range(VOCABULARY)]
    inputs = {"generate": {"successor": successor, "sizes": torch.tensor([BATCH, LENGTH, TEXT_LENGTH])}}
    files = {"generate.bin": formats.tokenizer_file(pieces, 2)}
    outcomes = cases.run(submission, "text", "generate", inputs, device=device, files=files)
    if outcomes["generate"].number("piece") == 0:
        raise cases.unfilled(tasks.TOKENIZER, "its first token decodes to nothing, so that nothing can be generated")
    expected = generated_tokens(successor)
    cases.judge_each(
        submission,
        tasks.GENERATE,
        outcomes,
        lambda outcome: _judge_generation(outcome, expected, pieces),
        device=device,
    )
    calls = outcomes["generate"].number("calls") or 0
    if calls < GENERATED:
        raise Ended(CheckStatus.PASSED, f"Generation stops after {calls} of {GENERATED} tokens; those are right.")


def _judge_generation(outcome: Outcome, expected: Sequence[int], pieces: Sequence[bytes]) -> None:
    """Stopping early is no loss by itself; what was generated must be right."""
    calls = outcome.number("calls") or 0
    if calls == 0:
        raise cases.unfilled(tasks.GENERATE, "the model was never asked")
    made = min(calls, GENERATED)
    fed = outcome.get("fed")
    row = [] if fed is None or fed.dim() == 0 or not fed.numel() else fed.reshape(-1, fed.shape[-1])[0].tolist()
    wanted = [*PROMPT, *expected[: made - 1]]
    got = row[: len(wanted)]
    message = (
        f"at its last call the model was given {got}, expected {wanted}: the prompt and what was sampled, which is the "
        f"token that the logits at place t - 1 are certain of"
    )
    require(got == wanted, message, {"got": got, "expected": wanted, "calls": calls})
    _require_printed(outcome.printed, [pieces[token] for token in expected[:made]])


def _require_printed(printed: bytes, wanted: Sequence[bytes]) -> None:
    """Other rows and line ends may stand between."""
    place = max(printed.find(PROMPT_TEXT), 0)
    for number, piece in enumerate(wanted, start=1):
        place = printed.find(piece, place)
        message = f"token {number} of {len(wanted)} generated ones, {piece.decode()!r}, is not in the printed text"
        require(place >= 0, message, {"printed": printed[-300:].decode("utf-8", "replace")})
        place += len(piece)
