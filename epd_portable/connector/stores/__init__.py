"""Stores of encoder outputs: one module a kind; `epd_portable.connector.stores.base` makes one."""
