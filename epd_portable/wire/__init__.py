"""Data that crosses process borders: descriptors, messages, request parameters, encoding.

Pure data: no torch, no sockets.
"""
