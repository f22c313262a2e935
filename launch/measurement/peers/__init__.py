"""The systems that are measured, one a file: how each is started, and, run as a module, how it serves."""
