"""Layers on different ranks: schedules say what each rank does when, one runtime does it."""
