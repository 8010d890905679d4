"""Split the sequence from the input on: queries stay, keys and values travel."""
