"""Decisions on requests and items, of the front and of the front; without I/O."""
