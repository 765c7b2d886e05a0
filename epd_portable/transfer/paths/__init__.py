"""Transfer paths, a module each; `epd_portable.transfer.registry` loads the chosen one."""
