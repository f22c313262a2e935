"""A tensor-parallel decoder: the same modules for prefill, decode, training and looking inside."""

__version__ = "0.1.0"
