"""``epd-bench load``: a topology under an open load, in turns with replicas and upstream."""
