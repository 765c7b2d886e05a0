"""The front: vLLM's own server over one engine client that knows the split."""
