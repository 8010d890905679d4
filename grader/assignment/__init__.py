"""What an assignment is, and how its starter is made."""
