"""Where student code runs. One protocol, two kinds."""
