"""The grader: takes a commit, runs it where it can do no harm, and says what works, what does not, and why."""
