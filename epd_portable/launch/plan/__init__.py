"""Plan of a topology: processes, with their arguments and places, and this machine's resources."""
