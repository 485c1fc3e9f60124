"""Time a decode step of DSV4-Flash on a Hopper, op by op: `lines`, `rows`, `table`, `run`."""
