"""What crosses process borders: descriptors, messages, request parameters and their encoding.

Pure data: no torch, no sockets.
"""
