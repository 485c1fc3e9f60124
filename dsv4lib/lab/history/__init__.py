"""What earlier runs measured, over commits: read it (store), follow it (series), judge it (trends), compare two runs.

`dsv4 history`, `dsv4 compare` and `dsv4 trends` print it; the rest of the lab writes it.
"""
