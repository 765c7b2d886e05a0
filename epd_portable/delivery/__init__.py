"""What is decided of the items of a request, whoever brings the bytes: pure, without I/O."""
