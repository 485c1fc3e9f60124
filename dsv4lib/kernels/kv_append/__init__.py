"""KV rows of new tokens into the rings of their requests."""
