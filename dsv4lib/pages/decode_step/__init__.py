"""The page on a decode step of DSV4-Flash: what it must read, what was measured, what is lost between."""
