"""One module a transfer path; `epd_portable.connector.registry` loads the one that is chosen."""
