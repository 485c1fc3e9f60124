"""The k best scores of a row: exact, with a defined order."""
