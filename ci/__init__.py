"""Tools that make and check the environments of this checkout; not in the installed package."""
