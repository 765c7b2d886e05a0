"""Encode engine: queue, two-level cache, sender of outputs.

============  =====================  ===============================================
process       module                 what
============  =====================  ===============================================
scheduler     `queue`, `two_levels`  which item is encoded next, and its cache space
scheduler     `dispatcher`           which consumer gets an item
worker        `host_copies`          second level of the cache, as the scheduler orders it
worker        `producer`             transfers: messages and time in, actions out
worker        `sender`, `writers`    threads that carry these actions out
worker        `store_writer`         outputs that were delivered, into the store
worker        `background`           overlapped encoding by a prefill+decode instance
worker        `chunks`               the same on devices, in chunks between steps
scheduler     `shared_encoder`       jobs of such an instance
============  =====================  ===============================================
"""
