"""Time a decode step of DSV4-Flash on a Hopper, op by op. In `lines`, `rows`, `table`, `run`."""
