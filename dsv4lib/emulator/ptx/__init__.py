"""PTX text to parsed modules."""
