"""Where admitted requests wait, and who tells them what became of them."""
