"""How many instances of what kind, by simulation."""
