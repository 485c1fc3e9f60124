"""Read the rates of the GPUs that the static model knows: data/bench/rates.csv. It is one table with sources.

``status`` says what a number is: measured, published, derived from these, architecture (a definition), fitted (to a
measured kernel) or assumed. The note of an assumption says what follows if it is wrong.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dsv4lib import env
from dsv4lib.errors import ArgumentError, ConfigError

TABLE = env.root() / "data" / "bench" / "rates.csv"
STATUSES = ("measured", "published", "derived", "architecture", "fitted", "assumed")


@dataclass(frozen=True)
class Rate:
    """One line of the table."""

    gpu: str
    name: str
    value: float
    unit: str
    status: str
    source: str
    note: str


@dataclass(frozen=True)
class Gpu:
    """A GPU: its name and its rates by name."""

    name: str
    rates: dict[str, Rate]

    def __getitem__(self, name: str) -> float:
        """Return the value of a rate.

        Raises:
            ArgumentError: the table has no such rate for this GPU.
        """
        if name not in self.rates:
            raise ArgumentError("rate", name, f"one of {self.name}'s: " + ", ".join(sorted(self.rates)))
        return self.rates[name].value

    def changed(self, **values: float) -> Gpu:
        """Change values of the same GPU, to see what an assumption is worth."""
        for name in values:
            self[name]
        new = {
            name: Rate(r.gpu, r.name, values.get(name, r.value), r.unit, r.status, r.source, r.note)
            for name, r in self.rates.items()
        }
        return Gpu(self.name, new)

    @property
    def l2_clk_bytes(self) -> float:
        """Return B a clock that all SMs together can read from L2."""
        return self["l2_bytes_sm"] * self["sms"]

    @property
    def hbm_clk_bytes(self) -> float:
        """Return B a clock from HBM."""
        return self["hbm_bytes_s"] / (self["clock"] * 1e9)

    def microseconds(self, clocks: float) -> float:
        """Convert a number of clocks to microseconds."""
        return clocks / (self["clock"] * 1e3)


@lru_cache(maxsize=2)
def table(path: Path = TABLE) -> tuple[Rate, ...]:
    """List every line.

    Raises:
        ConfigError: a value that is no positive number, an unknown status, a line without a source, or one twice.
    """
    rows, seen = [], set()
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            try:
                rate = Rate(line["gpu"], line["rate"], float(line["value"]), *(line[c] for c in list(line)[3:]))
            except (TypeError, ValueError) as error:
                raise ConfigError(f"value of {line['rate']}", line["value"], "a number") from error
            if rate.value <= 0 or rate.status not in STATUSES or not rate.source or (rate.gpu, rate.name) in seen:
                allowed = f"positive, once, with a source and a status of {', '.join(STATUSES)}"
                raise ConfigError(f"{rate.gpu} {rate.name}", f"{rate.value:g} ({rate.status}, {rate.source})", allowed)
            seen.add((rate.gpu, rate.name))
            rows.append(rate)
    return tuple(rows)


def gpu(name: str) -> Gpu:
    """Look up a GPU by name.

    Raises:
        ArgumentError: the table does not have it.
    """
    rows = {rate.name: rate for rate in table() if rate.gpu == name}
    if not rows:
        raise ArgumentError("gpu", name, "one of " + ", ".join(sorted({rate.gpu for rate in table()})))
    return Gpu(name, rows)
