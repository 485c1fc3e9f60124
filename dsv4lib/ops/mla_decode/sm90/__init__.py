"""Hopper's MLA decode over a paged 16-bit cache."""
