"""Which experts a token goes to: scores, top-k and weights."""
