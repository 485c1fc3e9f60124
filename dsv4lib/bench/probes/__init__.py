"""Measure one limit of a GPU by a small kernel: issue of copies, combines, launches."""
