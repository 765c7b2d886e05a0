"""Stands for CANN's pyacl where it is imported and not used."""
