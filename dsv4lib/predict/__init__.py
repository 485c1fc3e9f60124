"""Predict, apart from what was measured. What a kernel does, what a GPU can do, how long that would take."""
