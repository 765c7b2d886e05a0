"""Trains the bundled demo model; not part of the package."""
