"""This project's engine as a contestant: what each of its ranks does for the one that measures."""
