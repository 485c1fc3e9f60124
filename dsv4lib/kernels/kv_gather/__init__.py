"""Entries of a paged pool to dense rows."""
