"""All strategies at once: any factorisation of the world over tensor, context, expert, data and pipeline ranks."""
