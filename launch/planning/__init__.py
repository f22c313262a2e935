"""What `launch plan` shows, and how it measures a machine."""
