"""Many tokens an expert: MMAs, not weights, take the time."""
