"""What a request gets where it says nothing; apart, so that the command line can show it without torch."""

MAX_NEW_TOKENS = 128
"""Tokens that a sequence grows by, at most."""
PREFILL_CHUNK = 512
"""Prompt tokens of a step."""
