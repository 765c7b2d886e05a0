"""Items of a prefill+decode engine: cache space, slots, transfers, requests."""
