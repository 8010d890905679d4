"""Tensor parallel layers compute what whole ones do: outputs, input gradients, weight gradients."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from reference import comm
from reference.comm import Group
from reference.loss import IGNORE
from reference.tensor_parallel.dropout import Generators, dropout
from reference.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from reference.tensor_parallel.vocabulary import VocabularyParallelEmbedding, cross_entropy_sum, padded
from tests.reference import ranks
from tests.reference.equivalence import assert_equal_in_float64

SIZES = (1, 2, 3, 4)
BATCH, LENGTH, WIDTH = 2, 12, 12


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def feed_forward_inputs() -> dict[str, Tensor]:
    shapes = {"x": (BATCH, LENGTH, WIDTH), "w1": (24, WIDTH), "b1": (24,), "w2": (WIDTH, 24), "b2": (WIDTH,)}
    return {name: draw(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}


def whole_feed_forward(_: Group) -> dict[str, Tensor]:
    given = {name: tensor.requires_grad_() for name, tensor in feed_forward_inputs().items()}
    out = F.linear(F.gelu(F.linear(given["x"], given["w1"], given["b1"])), given["w2"], given["b2"])
    out.backward(draw(*out.shape, seed=9))
    return {"out": out.detach(), **{name: tensor.grad for name, tensor in given.items() if tensor.grad is not None}}


def split_feed_forward(group: Group, sequence_parallel: bool) -> dict[str, Tensor]:
    given = feed_forward_inputs()
    column = ColumnParallelLinear(WIDTH, 24, group, sequence_parallel=sequence_parallel).double()
    row = RowParallelLinear(24, WIDTH, group, sequence_parallel=sequence_parallel).double()
    column.load_whole(given["w1"], given["b1"])
    row.load_whole(given["w2"], given["b2"])

    def own(tensor: Tensor) -> Tensor:
        return comm.chunk(tensor, group, 1)[group.rank].contiguous() if sequence_parallel else tensor

    x = own(given["x"]).clone().requires_grad_()
    out = row(F.gelu(column(x)))
    out.backward(own(draw(BATCH, LENGTH, WIDTH, seed=9)))
    bias = row.bias.grad.clone()
    if sequence_parallel:
        comm.all_reduce(bias, group).wait()
    joined = (lambda t: comm.all_gather(t, group, 1)) if sequence_parallel else (lambda t: t)
    return {
        "out": joined(out.detach()),
        "x": joined(x.grad),
        "w1": comm.all_gather(column.weight.grad, group),
        "b1": comm.all_gather(column.bias.grad, group),
        "w2": comm.all_gather(row.weight.grad, group, 1),
        "b2": bias,
    }


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_column_then_row_is_a_whole_feed_forward(size: int, sequence_parallel: bool) -> None:
    expected = ranks.alone(whole_feed_forward)
    for got in ranks.run(size, split_feed_forward, sequence_parallel):
        assert_equal_in_float64(got, expected, "feed-forward")


def logits_and_targets(vocabulary: int, size: int) -> tuple[Tensor, Tensor]:
    """Logits of about a thousand, so that exponentials overflow, and targets on the edges of shards."""
    logits = 1000 * draw(3, 7, vocabulary, seed=vocabulary)
    targets = torch.randint(vocabulary, (3, 7), generator=torch.Generator().manual_seed(1))
    edge = padded(vocabulary, Group(tuple(range(size)))) // size
    edges = sorted({min(max(place, 0), vocabulary - 1) for place in (0, edge - 1, edge, vocabulary - 1)})
    targets[0, : len(edges)] = torch.tensor(edges)
    targets[1, 2:] = IGNORE
    return logits, targets


def whole_cross_entropy(_: Group, vocabulary: int, smoothing: float, size: int) -> dict[str, Tensor]:
    logits, targets = logits_and_targets(vocabulary, size)
    logits.requires_grad_()
    arguments = {"ignore_index": IGNORE, "reduction": "sum", "label_smoothing": smoothing}
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **arguments)
    total.backward()
    assert logits.grad is not None
    return {"loss": total.detach(), "gradient": logits.grad}


def split_cross_entropy(group: Group, vocabulary: int, smoothing: float) -> dict[str, Tensor]:
    logits, targets = logits_and_targets(vocabulary, group.size)
    own = padded(vocabulary, group) // group.size
    # What stands in the padding must not matter.
    room = F.pad(logits, (0, own * group.size - vocabulary), value=1e6)
    mine = room.split(own, -1)[group.rank].clone().requires_grad_()
    total = cross_entropy_sum(mine, targets, group, vocabulary=vocabulary, label_smoothing=smoothing)
    total.backward()
    return {"loss": total.detach(), "gradient": comm.all_gather(mine.grad, group, -1)[..., :vocabulary].contiguous()}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("vocabulary", [24, 25, 13])
@pytest.mark.parametrize("size", SIZES)
def test_cross_entropy_of_split_logits(size: int, vocabulary: int, smoothing: float) -> None:
    expected = ranks.alone(whole_cross_entropy, vocabulary, smoothing, size)
    for got in ranks.run(size, split_cross_entropy, vocabulary, smoothing):
        assert_equal_in_float64({"loss": got["loss"]}, {"loss": expected["loss"]}, "loss")
        assert_equal_in_float64({"gradient": got["gradient"]}, {"gradient": expected["gradient"]}, "gradient")


def embedded(group: Group, vocabulary: int, sequence_parallel: bool) -> dict[str, Tensor]:
    table, tokens = draw(vocabulary, WIDTH), torch.arange(24).view(2, 12) % vocabulary
    layer = VocabularyParallelEmbedding(vocabulary, WIDTH, group, sequence_parallel=sequence_parallel).double()
    layer.load_whole(table)
    out = layer(tokens)
    gradient = draw(2, 12, WIDTH, seed=4)
    out.backward(comm.chunk(gradient, group, 1)[group.rank].contiguous() if sequence_parallel else gradient)
    rows = comm.all_gather(layer.weight.grad, group)[:vocabulary]
    return {"out": comm.all_gather(out.detach(), group, 1) if sequence_parallel else out.detach(), "table": rows}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("vocabulary", [24, 25])
@pytest.mark.parametrize("size", SIZES)
def test_embedding_with_its_rows_split(size: int, vocabulary: int, sequence_parallel: bool) -> None:
    expected = ranks.alone(embedded, vocabulary, False)
    for got in ranks.run(size, embedded, vocabulary, sequence_parallel):
        assert_equal_in_float64(got, expected, "embedding")


def masks(group: Group) -> tuple[Tensor, Tensor]:
    generators = Generators.seeded(7, group)
    ones = torch.ones(1000, dtype=torch.float64)
    return dropout(ones, 0.5, generators.replicated), dropout(ones, 0.5, generators.split)


def test_dropout_agrees_where_values_are_replicated_and_differs_where_they_are_split() -> None:
    (same_0, own_0), (same_1, own_1) = ranks.run(2, masks)
    assert torch.equal(same_0, same_1)
    # Two independent masks agree on half of 1000 elements, give or take 16; the bound is ten deviations.
    assert abs(int((own_0 == own_1).sum()) - 500) < 160
    assert set(own_0.tolist()) == {0.0, 2.0}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda group: ColumnParallelLinear(4, 7, group), "7 output features do not divide by 2"),
        (lambda group: RowParallelLinear(7, 4, group), "7 input features do not divide by 2"),
        (lambda _: dropout(torch.ones(2), 1.0, torch.Generator()), "1.0 is not in"),
    ],
)
def test_what_does_not_divide_is_refused_with_its_numbers(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(Group((0, 1), 0))
