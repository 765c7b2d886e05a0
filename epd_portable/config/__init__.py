"""Configuration: the topology file that users write and what each instance is told."""
