"""The parts of `benchmarks/gpu_check.py`, one a file: `run(record, machine)`."""
