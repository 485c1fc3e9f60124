"""Measure one limit of a GPU by a small kernel. Issue of copies, combines, launches."""
