"""A record in, a report out. Computes nothing."""
