"""What `python -m benchmarks.multi_node` is made of."""
