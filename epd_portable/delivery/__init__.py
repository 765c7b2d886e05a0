"""What is decided of requests and their items, whoever brings the bytes: without I/O."""
