"""Hopper's attention of decode steps over 584-byte entries."""
