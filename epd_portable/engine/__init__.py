"""Processes of engines that have no server of their own."""
