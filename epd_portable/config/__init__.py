"""Configuration: the topology file, hardware profiles, and the settings of each instance."""
