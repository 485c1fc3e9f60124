"""What the notebook of the whole model calls."""
