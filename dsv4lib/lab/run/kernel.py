"""Be the Jupyter kernel of a notebook run, a cheaper ipykernel. ``python -m`` this module ``-f <connection file>``.

An injected fault's run computes for a second in a process that needs five: most of its time are imports and the end of
the interpreter. Two things are left out, neither of which a cell can see:

- The collector of cyclic garbage looks through the young objects every 50,000 allocations and not every 700. Imports
  of torch and the CuTe DSL make some 10^6 objects that stay, and each pass goes over them in vain: 0.3 s of 1.9 s.
- After the last `atexit` function the process ends without taking its modules apart, 0.7 s of freeing memory that the
  operating system takes back at once.

A kernel that ends in another way (an exception, a signal, ``os._exit`` in a cell) ends as it would under ipykernel.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable

YOUNG = 50_000  # allocations between two looks at the young objects
COMMAND = [sys.executable, "-m", "dsv4lib.lab.run.kernel"]
_last: list[Callable[[], None]] = []


def end_at_once() -> None:
    """End the process after all other `atexit` functions. The first that is registered runs last."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            stream.flush()
    os._exit(0)


def prepare() -> None:
    """Make imports cheaper, and keep the place of the last `atexit` function. Call this before other imports."""
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
    atexit.register(lambda: [function() for function in _last])


def end_quickly() -> None:
    """Have the process, which now ends, run its `atexit` functions. Its modules are not taken apart."""
    _last.append(end_at_once)
    gc.freeze()  # IPython collects garbage as it ends


def run() -> None:
    """Run ipykernel until its client shuts it down."""
    from ipykernel import kernelapp

    from dsv4lib.lab.run import network

    network.close_if_asked()
    kernelapp.launch_new_instance()
    end_quickly()


def main() -> None:
    """Run the kernel in this process, which was started for it."""
    if sys.path[0] in ("", os.getcwd()):  # its launcher does so: no file of the folder hides a module imported below
        del sys.path[0]
    prepare()
    run()


if __name__ == "__main__":
    main()
