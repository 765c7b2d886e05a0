"""``epd-launch``: plan a topology, start its processes, keep them alive and end them all."""
