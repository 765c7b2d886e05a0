"""Filter, score, pick: which instance gets what, by plug-ins that a file names. Pure."""
