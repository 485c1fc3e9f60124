"""Measure how fast the emulator is on this machine."""
