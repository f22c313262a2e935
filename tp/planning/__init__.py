"""Arithmetic about runs: what they will take, without running them."""
