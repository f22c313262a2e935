"""What `launch inspect` finds in a model, and how it is shown: a table, JSON, one HTML file, PNG files."""
