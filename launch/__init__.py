"""The command line: commands, starting ranks, and ending them when one fails."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""Where the packages `launch` and `tp` lie."""
