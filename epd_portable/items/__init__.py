"""What a prefill+decode engine knows of its items: cache space, slots, transfers, requests."""
