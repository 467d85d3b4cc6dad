"""What promising KV by expected lengths costs and gains."""
