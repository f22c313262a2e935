"""The operations between the matmuls, one a file, each with the rounding points of docs/numerics.md."""
