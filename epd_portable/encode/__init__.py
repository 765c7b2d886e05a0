"""Encode engine: queue, two-level cache, sender of outputs.

============  =====================  ===============================================
process       module                 what
============  =====================  ===============================================
scheduler     `queue`, `two_levels`  which item is encoded next, and its cache space
scheduler     `dispatcher`           which consumer gets an item
worker        `outputs`              outputs until each transfer of theirs has ended; writes
worker        `sender`               one thread; messages of `producer`
worker        `background`           overlapped encoding by a prefill+decode instance
============  =====================  ===============================================
"""
