"""Leave something to read of a run. Reports, saved notebooks, and what is scrubbed from them."""
