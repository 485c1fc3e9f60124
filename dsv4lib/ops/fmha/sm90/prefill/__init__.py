"""Attention of many tokens on Hopper over 584-byte entries."""
