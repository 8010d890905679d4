"""Intake: from what a person pasted to the files that are graded."""
