"""Which item gets room in the encoder cache, and when.

Plain Python: no engine, no torch, no sockets.
"""
