"""How each kind of submission is built and driven from outside."""
