"""Split big matrices inside a layer, and, with sequence parallelism, what lies between them along the sequence."""
