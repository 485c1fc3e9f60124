"""Share what all ops need. Checks of arguments, overlap, back end, compile cache, plans of warm calls, launches."""
