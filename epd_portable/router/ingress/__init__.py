"""Who comes in: keys, origins, trusted hops, limits and who waits."""
