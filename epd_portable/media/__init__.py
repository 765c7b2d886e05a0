"""What media files would be when decoded, from their headers, and the limits on it. Pure."""
