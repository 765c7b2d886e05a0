"""Sizes of media files when decoded, from their headers, and the limits on them. Pure."""
