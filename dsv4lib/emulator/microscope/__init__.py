"""Show a launch on a page: timeline, memories, barriers, source. From a trace to one file."""
