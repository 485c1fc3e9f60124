"""Run a launch: grid, CTAs, warps, scheduler, asynchronous units, limits."""
