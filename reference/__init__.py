"""How each parallel strategy is done right. Knows nothing of grading."""
