"""Whether who was refused and comes back when it was told to gets in, and how true the told times are."""
