"""``epd-bench router``: what the router costs, measured from outside."""
