"""The instances: their state and load, registration, probes and control channels."""
