"""A topology as files for an orchestrator of machines, which nothing here talks to."""
