"""Parse PTX text to modules."""
