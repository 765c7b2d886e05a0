"""Moves encoder outputs between instances: control protocol, receive pool, transports, choice."""
