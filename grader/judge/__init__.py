"""Outputs in, verdicts out. Runs outside the sandbox and never executes what a student wrote."""
