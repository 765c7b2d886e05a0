"""Measures transfers and serving, with peers in the same run."""
