"""What makes and checks the environments of this checkout; never part of the installed package."""
