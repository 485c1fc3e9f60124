"""Tokens in the order of their experts."""
