"""Whether a text depends on who shares the batch."""
