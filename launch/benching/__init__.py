"""What `launch bench` is made of: the sweep, its rows, and how they are kept, shown and drawn."""
