"""Run the lab on top of the library. Stage contracts, the notebook runner, records, reports and the command line.

Importing this package is cheap; the functions that notebooks call are loaded when first used. Nothing in the
library imports `lab`: only notebooks and tests do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4lib.lab.notebook.notebook_api import answer, card, target, verdict

__all__ = ["answer", "card", "target", "verdict"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from dsv4lib.lab.notebook import notebook_api

        return getattr(notebook_api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
