"""Who may come in, in which class, and what its prompt is."""
