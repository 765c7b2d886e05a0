"""What requests pass first: keys, origins, trusted hops and admission."""
