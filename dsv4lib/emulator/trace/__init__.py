"""Record, store and export the trace of a launch."""
