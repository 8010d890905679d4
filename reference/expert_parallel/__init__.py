"""Experts on different ranks: tokens travel to the experts that a gate chose for them, and back."""
