"""The command line: commands, starting ranks, and ending them when one fails."""
