"""The HTTP surface: bytes in, requests out, and answers back in the shapes that clients know."""
