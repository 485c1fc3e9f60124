"""What notebook 06 calls."""
