"""`make bench-reference`: ours against torch's own, one table."""

import sys

import click
import torch

from tests.reference.benchmarks.cases import CASES
from tests.reference.benchmarks.measure import MOST, MOST_UPPER, ROUNDS, Result, race

AGREE = 1e-4  # of float32 sums in another order; far below any mistake


@click.command()
@click.option("--only", multiple=True, help="Names of cases.")
@click.option("--rounds", type=click.IntRange(min=1), default=ROUNDS, show_default=True)
def main(only: tuple[str, ...], rounds: int) -> None:
    """Race every case on two ranks and print the table; exit 1 where one is over or computes something else."""
    torch.set_num_threads(1)
    click.echo(f"two ranks, {rounds} rounds in turn; ok: ratio <= {MOST:.2f} and upper end of 95 % <= {MOST_UPPER:.2f}")
    click.echo(f"{'strategy':<26}{'torch':<32}{'ours ms':>9}{'theirs ms':>11}{'ratio':>7}{'95 %':>14}{'differ':>9}  ")
    results = [_row(name, *CASES[name], rounds) for name in only or CASES]
    sys.exit(any(result.verdict == "over" or result.difference > AGREE for result in results))


def _row(name: str, peer: str, make, rounds: int) -> Result:
    result = race(name, peer, make, 2, rounds)
    ours, theirs = (sorted(times)[len(times) // 2] * 1e3 for times in (result.ours, result.theirs))
    low, high = result.interval
    verdict = result.verdict if result.difference <= AGREE else "DIFFERENT NUMBERS"
    click.echo(
        f"{name:<26}{peer:<32}{ours:>9.1f}{theirs:>11.1f}{result.ratio:>7.2f}{low:>8.2f}-{high:.2f}"
        f"{result.difference:>9.0e}  {verdict}"
    )
    return result


if __name__ == "__main__":
    main()
