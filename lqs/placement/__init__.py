"""Which devices there are, what is free on each, and which one a name means."""
