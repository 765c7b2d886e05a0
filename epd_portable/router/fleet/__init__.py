"""The instances: their state and load, who comes and goes, what they say."""
