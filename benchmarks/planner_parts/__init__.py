"""The parts of `benchmarks/planner_validation.py`: what the planner predicts beside what was measured."""
