"""Data parallelism: every rank holds the model (or its shard) and other tokens; gradients are summed."""
