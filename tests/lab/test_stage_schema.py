"""The stage contract's JSON schema and page: what is stored is what the classes say, and it bites."""

from __future__ import annotations

import json
import tomllib

import jsonschema
import pytest

from dsv4lib import env
from dsv4lib.errors import DSV4Error
from dsv4lib.lab import stage_schema
from dsv4lib.lab.stage import StageError, load

STAGES = env.root() / "stages"
FILES = sorted(STAGES.glob("*/stage.toml"))
PAGE = (STAGES / stage_schema.PAGE).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def validator():
    schema = json.loads((STAGES / stage_schema.SCHEMA).read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def example():
    """The page's own example."""
    return tomllib.loads(PAGE.partition("```toml\n")[2].partition("```")[0])


def test_what_is_stored_is_what_the_classes_say():
    assert (STAGES / stage_schema.SCHEMA).read_text(encoding="utf-8") == stage_schema.schema_text()
    assert stage_schema.page(PAGE) == PAGE
    keys = [key for key, *_ in stage_schema.rows()]
    assert len(keys) == len(set(keys)) and all(meaning for *_, meaning in stage_schema.rows())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_every_stage_fits_and_names_the_schema(validator, path):
    text = path.read_text(encoding="utf-8")
    assert text.startswith(stage_schema.DIRECTIVE + "\n")
    validator.validate(tomllib.loads(text))


def test_the_pages_example_is_a_contract(validator, tmp_path):
    validator.validate(example())
    (tmp_path / "stages" / "doubling").mkdir(parents=True)
    (tmp_path / "stages" / "doubling" / "stage.toml").write_text(PAGE.partition("```toml\n")[2].partition("```")[0])
    assert load("doubling", tmp_path).negatives[0].expect_fail == "max_error"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: raw.update(colour="red"), "colour"),
        (lambda raw: raw.pop("kernel"), "kernel"),
        (lambda raw: raw.update(gates=[]), "gates"),
        (lambda raw: raw["gates"][0].update(op="!="), "op"),
        (lambda raw: raw["sets"]["quick"].update(time_limit_s=0), "time_limit_s"),
        (lambda raw: raw["parameters"]["rows"].update(type="number"), "type"),
        (lambda raw: raw["negatives"][0].update(parameters={}), "parameters"),
    ],
)
def test_schema_and_reader_refuse_alike(validator, tmp_path, change, said):
    raw = example()
    change(raw)
    assert not validator.is_valid(raw)
    (tmp_path / "stages" / "doubling").mkdir(parents=True)
    (tmp_path / "stages" / "doubling" / "stage.toml").write_text(as_toml(raw))
    with pytest.raises(StageError, match=said):
        load("doubling", tmp_path)


def as_toml(raw):
    """JSON values as inline TOML."""

    def value(one):
        if isinstance(one, dict):
            return "{ " + ", ".join(f"{key} = {value(item)}" for key, item in one.items()) + " }"
        if isinstance(one, list):
            return "[" + ", ".join(map(value, one)) + "]"
        return json.dumps(one)

    return "".join(f"{key} = {value(one)}\n" for key, one in raw.items())


def test_a_page_without_marks_is_refused():
    with pytest.raises(DSV4Error, match="keys"):
        stage_schema.page("no marks")
