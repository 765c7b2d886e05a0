"""Stores of encoder outputs: one module a kind; `epd_portable.transfer.stores.base` makes one."""
