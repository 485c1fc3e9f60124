"""Linear layers in every precision mode, alone or in groups that see all tokens."""
