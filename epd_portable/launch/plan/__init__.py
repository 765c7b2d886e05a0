"""What a topology becomes: processes, with their arguments and places; what this machine has."""
