"""``epd-bench load``: a topology under an open load beside replicas and upstream, in turns."""
