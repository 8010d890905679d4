"""What every schedule asks of its arguments."""


def require_positive(num_ranks: int, num_microbatches: int, chunks: int = 1) -> None:
    """Raise `ValueError` unless all three are at least 1."""
    for name, value in (("ranks", num_ranks), ("microbatches", num_microbatches), ("chunks a rank", chunks)):
        if value < 1:
            raise ValueError(f"a pipeline of {value} {name} was asked for; at least 1 is needed")
