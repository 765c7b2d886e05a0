"""One module a transfer path; `epd_portable.transfer.registry` loads the one that is chosen."""
