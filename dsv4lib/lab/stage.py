"""Hold the contract of a stage. Says what `stages/<name>/stage.toml` may say, and how its parameters are checked.

A stage is one notebook with typed, bounded parameters, parameter sets (`quick`, `nightly`, `b200`, and `hopper` where
its kernel is for that GPU), gates on the metrics its verdict reports, and negative sets: injected faults that must turn
a named gate red. Parameters are checked here, before a kernel starts, because papermill itself accepts unknown names
and wrong types.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import operator
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from dsv4lib import env
from dsv4lib.errors import DSV4Error

SETS = ("quick", "nightly", "b200", "hopper")
NEEDED_SETS = SETS[:3]  # every stage has these; a set that it lacks leaves it out
# Sets whose kernels are to run on a GPU, and nowhere else, with the architectures of those kernels.
GPU_SETS = {"b200": ("sm_100a", "sm_100f", "sm_103a"), "hopper": ("sm_90a",)}
OPERATORS = {"==": operator.eq, "<=": operator.le, "<": operator.lt, ">=": operator.ge, ">": operator.gt}

Value = bool | int | float | str
Identifier = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Number = Annotated[float, Field(allow_inf_nan=False)]


class StageError(DSV4Error):
    """A `stage.toml` that is missing, unreadable or contradicts itself."""


class UnknownStage(DSV4Error):
    """There is no stage of that name; the message names the nearest one."""


class UnknownParameter(DSV4Error):
    """The stage has no parameter of that name; the message names the nearest one."""


class WrongType(DSV4Error):
    """A parameter value of another type than the stage declares."""


class OutOfBounds(DSV4Error):
    """A parameter value of the right type that the stage does not allow."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Parameter(_Strict):
    """One typed, bounded parameter of a notebook."""

    type: Literal["int", "float", "bool", "str", "path"] = Field(description="of the value; a bool is no int")
    default: Value = Field(description="the value in the notebook's `parameters` cell, word for word")
    help: str = Field(min_length=1, description="what it sets, with its unit; shown by `./dsv4 stages --json`")
    min: Number | None = Field(default=None, description="least value, int and float only")
    max: Number | None = Field(default=None, description="largest value, int and float only")
    multiple_of: int | None = Field(default=None, gt=0, description="what the value must divide by, int only")
    choices: list[str] | None = Field(default=None, min_length=1, description="the allowed values, str only")

    @model_validator(mode="after")
    def _options_fit_the_type(self) -> Parameter:
        if self.type not in ("int", "float") and (self.min is not None or self.max is not None):
            raise ValueError("min and max belong to int and float parameters")
        if self.type != "int" and self.multiple_of is not None:
            raise ValueError("multiple_of belongs to int parameters")
        if self.type != "str" and self.choices is not None:
            raise ValueError("choices belong to str parameters")
        return self

    def allowed(self) -> str:
        """Say type and bounds in words, for messages. For example ``int, 16 <= value <= 256, multiple of 16``."""
        words = [self.type]
        if self.min is not None or self.max is not None:
            low = f"{self.min:g} <= " if self.min is not None else ""
            high = f" <= {self.max:g}" if self.max is not None else ""
            words.append(f"{low}value{high}")
        if self.multiple_of is not None:
            words.append(f"multiple of {self.multiple_of}")
        if self.choices is not None:
            words.append("one of " + ", ".join(self.choices))
        if self.type == "path":
            words.append("an existing file or folder, relative to the workspace")
        return ", ".join(words)

    def check(self, stage: str, name: str, value: Any, root: Path) -> Value:
        """Return ``value`` in the declared type, or raise.

        Args:
            stage: name of the stage, for the message.
            name: name of the parameter, for the message.
            value: a Python value (not text to be converted).
            root: the workspace, against which a relative path is looked up.

        Raises:
            WrongType: not of the declared type (a bool is not an int).
            OutOfBounds: right type, but outside the bounds or choices.
        """
        kinds = {"int": int, "float": (int, float), "bool": bool, "str": str, "path": str}[self.type]
        if not isinstance(value, kinds) or (isinstance(value, bool) and self.type != "bool"):
            raise WrongType(
                f"stage {stage}: parameter {name} takes {_article(self.type)}, not {_shown(value)} "
                f"(a {type(value).__name__}); allowed: {self.allowed()}"
            )
        if self.type == "float":
            value = float(value)
        if not self._inside(value, root):
            near = difflib.get_close_matches(value, self.choices, 1, 0.4) if self.choices else []
            hint = f"; the nearest choice is {near[0]}" if near else ""
            raise OutOfBounds(f"stage {stage}: {name}={_shown(value)} is out of bounds: {self.allowed()}{hint}")
        return value

    def parse(self, stage: str, name: str, text: str, root: Path) -> Value:
        """Read ``text`` from a command line strictly by the declared type. Then `check` it.

        Integers are decimal, booleans are exactly ``true`` or ``false``.
        """
        value: Any = text
        try:
            if self.type == "int":
                value = int(text, 10)
            elif self.type == "float":
                value = float(text)
            elif self.type == "bool":
                value = {"true": True, "false": False}[text]
        except (ValueError, KeyError):
            raise WrongType(
                f"stage {stage}: parameter {name} takes {_article(self.type)}, and {_shown(text)} is not one; "
                f"allowed: {'true or false' if self.type == 'bool' else self.allowed()}"
            ) from None
        return self.check(stage, name, value, root)

    def _inside(self, value: Value, root: Path) -> bool:
        if self.type in ("int", "float"):
            return (
                math.isfinite(value)
                and (self.min is None or value >= self.min)
                and (self.max is None or value <= self.max)
                and (self.multiple_of is None or value % self.multiple_of == 0)
            )
        if self.choices is not None:
            return value in self.choices
        return self.type != "path" or (value != "" and (root / str(value)).exists())


class ParameterSet(_Strict):
    """A named list of runs of the notebook, and a limit for each. A run is a dict of parameter overrides.

    Attributes:
        time_limit_s: CPU seconds of a run's processes, native runs too; threads that run side by side count once. A
            run that sleeps ends after five times as many seconds of wall time; waiting for a core never counts
            (`lab/run/meter.py`).
        runs: parameter overrides.
    """

    time_limit_s: float = Field(gt=0, le=86400, description="CPU seconds of one run; waiting for a core never counts")
    runs: list[dict[str, Value]] = Field(
        min_length=1, description="a run each: parameters that differ from their defaults, `{}` for none"
    )


class Gate(_Strict):
    """A bound on one metric. ``last_seen`` is the value it had when the bound was chosen."""

    metric: Identifier = Field(description="a metric that the notebook's `lab.verdict` reports")
    op: Literal["==", "<=", "<", ">=", ">"] = Field(description="how the metric compares with the bound")
    bound: Number = Field(description="the bound; NaN and infinite metrics never pass")
    last_seen: Number = Field(
        description="the metric when the bound was chosen; a bound over 4 times looser is refused"
    )
    reason: str = Field(min_length=1, description="why this bound, in a line")
    no_fault: str = Field(default="", description="why no negative turns it red, in a line; none does if it is said")

    def passes(self, value: float) -> bool:
        """Tell whether ``value`` is finite and inside the bound. NaN and infinities never pass."""
        return math.isfinite(value) and OPERATORS[self.op](value, self.bound)


class Negative(_Strict):
    """An injected fault. With ``parameters`` the gate on every metric of ``expect_fail`` must fail."""

    name: Identifier = Field(description="of the fault; `./dsv4 run --negatives` runs all faults")
    parameters: dict[str, Value] = Field(min_length=1, description="what injects the fault")
    expect_fail: Identifier | Annotated[list[Identifier], Field(min_length=1)] = Field(
        description="the metric whose gate must fail, or several whose gates all must"
    )

    @model_validator(mode="before")
    @classmethod
    def _keys_have_todays_names(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and "reds" in raw:
            raise ValueError("the key reds is called expect_fail now: the metric whose gate must fail")
        return raw

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics whose gates must all fail, each once."""
        named = [self.expect_fail] if isinstance(self.expect_fail, str) else self.expect_fail
        return tuple(dict.fromkeys(named))


class Stage(_Strict):
    """One `stage.toml`, checked. ``name`` is the folder's name, ``root`` the workspace it was read from."""

    title: str = Field(min_length=1, description="a heading in reports")
    summary: str = Field(
        min_length=1, max_length=91, description="one sentence of at most 90 characters and a full stop"
    )
    notebook: str = Field(description="path inside the workspace; it decides the place in the reading order")
    kernel: bool = Field(description="whether the stage runs a kernel; if so it is skipped under `reference`")
    arch: str = Field(default="sm_100a", description="the architecture whose code the stage runs")
    also: list[str] = Field(default=[], description="further architectures, in sets that name a GPU of theirs alone")
    parameters: dict[Identifier, Parameter] = Field(description="by name; exactly those of the notebook")
    sets: dict[Literal["quick", "nightly", "b200", "hopper"], ParameterSet] = Field(
        default={},
        description="`quick` on any CPU, `nightly` for longer, `b200` on that GPU: all needed; `hopper` on that GPU",
    )
    gates: list[Gate] = Field(min_length=1, description="bounds on metrics; the runner alone decides by them")
    negatives: list[Negative] = Field(default=[], description="injected faults, each with the gate it must turn red")

    _name: str = PrivateAttr("")
    _root: Path = PrivateAttr(Path())

    @property
    def name(self) -> str:
        """Name of the stage: its folder under `stages/`."""
        return self._name

    @property
    def archs(self) -> tuple[str, ...]:
        """List the architectures that its kernels are made for, the one of the emulator first."""
        return (self.arch, *self.also)

    def archs_in(self, set_name: str, negative: bool = False) -> tuple[str, ...]:
        """Return what its kernels may run as: in a set that names a GPU that GPU's architectures, else ``arch``.

        A ``negative`` turns a gate of ``arch`` red, and a set that names no GPU means the same on every machine.
        """
        own = () if negative else GPU_SETS.get(set_name, ())
        return tuple(arch for arch in self.archs if arch in own) or (self.arch,)

    @property
    def root(self) -> Path:
        """Return the workspace that holds the stage."""
        return self._root

    @property
    def notebook_path(self) -> Path:
        """Return the notebook file."""
        return self._root / self.notebook

    @property
    def defaults(self) -> dict[str, Value]:
        """Return every parameter with its default."""
        return {name: spec.default for name, spec in self.parameters.items()}

    def parameter_set(self, name: str) -> ParameterSet:
        """Look up the set ``name``; StageError where the stage lacks it."""
        if name not in SETS:
            raise StageError(f"no parameter set {_shown(name)}{_nearest(name, SETS)}; sets: {', '.join(SETS)}")
        if name not in self.sets:
            raise StageError(f"stage {self.name} has no parameter set {name}; it has: {', '.join(self.sets) or 'none'}")
        return self.sets[name]

    def never_red(self) -> list[str]:
        """List the metrics of gates that no negative turns red."""
        red = {metric for negative in self.negatives for metric in negative.metrics}
        return [gate.metric for gate in self.gates if gate.metric not in red]

    def negative(self, name: str) -> Negative:
        """Look up the negative set ``name``; StageError where the stage lacks it."""
        for negative in self.negatives:
            if negative.name == name:
                return negative
        names = [n.name for n in self.negatives]
        raise StageError(f"stage {self.name} has no negative set {_shown(name)}{_nearest(name, names)}")

    def fingerprint(self) -> str:
        """Hash the stage's contract and notebook to 12 hex digits."""
        digest = hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True).encode())
        if self.notebook_path.is_file():
            digest.update(self.notebook_path.read_bytes())
        return digest.hexdigest()[:12]


def workspace() -> Path:
    """Return the folder that holds `stages/` and `notebooks/`. The runner names it to the notebooks it starts."""
    return Path(os.environ.get("DSV4_WORKSPACE") or env.root())


def runs_folder(root: Path | None = None) -> Path:
    """Return the folder that keeps runs: `data/runs` of ``root``; of an installed wheel, `runs` in the user's data."""
    root = root or workspace()
    return env.own_data() / "runs" if env.is_installed() and root == env.root() else root / "data" / "runs"


def names(root: Path | None = None) -> list[str]:
    """Return names of all stages under ``root``/stages, in the order of notebooks."""
    return [stage.name for stage in discover(root)]


def discover(root: Path | None = None) -> list[Stage]:
    """Find all stages under ``root``/stages in reading order. By notebook name, then stage name.

    Raises:
        StageError: one of them is not a valid contract, or a folder has no stage.toml.
    """
    root = root or workspace()
    folders = [path for path in sorted((root / "stages").glob("*")) if path.is_dir() and not path.name.startswith(".")]
    return sorted((_read(path, root) for path in folders), key=lambda stage: (stage.notebook, stage.name))


def load(name: str, root: Path | None = None) -> Stage:
    """Load the stage ``name``.

    Raises:
        UnknownStage: no such folder under stages/; names the nearest one.
        StageError: its stage.toml is not a valid contract.
    """
    root = root or workspace()
    known = [path.parent.name for path in sorted((root / "stages").glob("*/stage.toml"))]
    if name not in known:
        raise UnknownStage(f"no stage {_shown(name)}{_nearest(name, known)}; stages: {', '.join(known) or 'none'}")
    return _read(root / "stages" / name, root)


def resolve_parameters(
    stage: Stage, overrides: Mapping[str, Any] | None = None, texts: Mapping[str, str] | None = None
) -> dict[str, Value]:
    """Resolve all parameters of ``stage``, with ``overrides`` applied and checked.

    Args:
        stage: the contract.
        overrides: Python values, as in a parameter set.
        texts: values as text, as on a command line; they win over ``overrides``.

    Raises:
        UnknownParameter, WrongType, OutOfBounds: each names the stage, what is allowed and the nearest name.
    """
    values = stage.defaults
    for name, value in (overrides or {}).items():
        values[name] = _specification(stage, name).check(stage.name, name, value, stage.root)
    for name, text in (texts or {}).items():
        values[name] = _specification(stage, name).parse(stage.name, name, text, stage.root)
    return values


def _specification(stage: Stage, name: str) -> Parameter:
    if name not in stage.parameters:
        has = ", ".join(f"{key} ({spec.type})" for key, spec in stage.parameters.items())
        near = _nearest(name, stage.parameters)
        raise UnknownParameter(f"stage {stage.name} has no parameter {_shown(name)}{near}; parameters: {has}")
    return stage.parameters[name]


def _read(folder: Path, root: Path) -> Stage:
    path = folder / "stage.toml"
    try:
        with path.open("rb") as file:
            raw = tomllib.load(file)
        stage = Stage.model_validate(raw)
    except FileNotFoundError:
        raise StageError(f"stages/{folder.name} has no stage.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StageError(f"stages/{folder.name}/stage.toml cannot be read: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise StageError(f"stages/{folder.name}/stage.toml: {where}: {first['msg']}") from None
    stage._name, stage._root = folder.name, root
    _check_consistency(stage)
    return stage


def _check_consistency(stage: Stage) -> None:
    """What pydantic cannot see: parameter values in the sets, and negatives that name a gate."""
    if Path(stage.notebook).is_absolute() or ".." in Path(stage.notebook).parts:
        raise StageError(f"stage {stage.name}: notebook must be a path inside the workspace, not {stage.notebook}")
    metrics = {gate.metric for gate in stage.gates}
    try:
        resolve_parameters(stage, stage.defaults)
        for parameter_set in stage.sets.values():
            for run in parameter_set.runs:
                resolve_parameters(stage, run)
        for negative in stage.negatives:
            resolve_parameters(stage, negative.parameters)
    except (UnknownParameter, WrongType, OutOfBounds) as error:
        raise StageError(f"stages/{stage.name}/stage.toml contradicts itself: {error}") from None
    for name, metric in [(negative.name, metric) for negative in stage.negatives for metric in negative.metrics]:
        if metric not in metrics:
            raise StageError(
                f"stage {stage.name}: negative {name} must turn a gate red, and there is no gate on "
                f"{metric}{_nearest(metric, metrics)}"
            )


def _nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean x?`` for the most similar known name, or an empty string where there is none at all."""
    ranked = sorted(known, key=lambda other: -difflib.SequenceMatcher(None, name.lower(), other.lower()).ratio())
    return f"; the nearest name is {ranked[0]}" if ranked else ""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _article(kind: str) -> str:
    return {"int": "an int", "float": "a float", "bool": "a bool", "str": "a str", "path": "a path"}[kind]
