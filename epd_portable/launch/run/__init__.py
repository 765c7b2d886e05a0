"""The processes of a plan: started, watched, updated and ended."""
