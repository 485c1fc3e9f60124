"""Attention output turned back by its query's position and quantised to E4M3 in groups of 128."""
