"""Tools that developers run by hand; not part of the package."""
