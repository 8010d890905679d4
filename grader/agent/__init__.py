"""The only grader code that runs inside a sandbox."""
