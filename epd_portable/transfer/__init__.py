"""Moves encoder outputs between engines: control channel, receive pool, paths and their choice."""
