"""Decisions on requests and items, of the router and of the engine front; without I/O."""
