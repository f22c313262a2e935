"""The parts of `benchmarks/norm_placement.py`."""
