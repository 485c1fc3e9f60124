"""Helper modules of these tests (corpus.py, cases_*.py) are imported by name."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
