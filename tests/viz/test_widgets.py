"""The explorer: sliders with a kernel, fixed figures without, and nothing from a figure runs as HTML."""

from html.parser import HTMLParser

import pytest
from IPython.core.interactiveshell import InteractiveShell

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import style, widgets

CONTROLS = {"m": [64, 128], "name": ["a", "b", "c"]}


def draw(m, name):
    if name == "c":
        raise ArgumentError("name", name, "'a' or 'b'")
    return style.new_figure(1.0, 2.0, alt=f"<b>{m}</b> & {name}"), f"{m} of {name}"


@pytest.fixture
def outputs(monkeypatch):
    """Everything displayed, as (mime bundle or object)."""
    seen = []
    monkeypatch.setattr("IPython.display.display", lambda *objects, **kw: seen.extend(objects))
    return seen


def test_headless_shows_figures_and_no_widget(monkeypatch, outputs, capsys):
    monkeypatch.setenv("DSV4_HEADLESS", "1")
    widgets.explore(draw, CONTROLS, states=[{"m": 128}, {"name": "c"}], name="b")
    assert capsys.readouterr().out == "m 64, name b: 64 of b\n"
    assert len(outputs) == 2 and all(type(o).__name__ == "Image" for o in outputs)
    assert outputs[0].alt == "<b>64</b> & b"
    alt = outputs[1].alt
    assert "m 128, name b: 128 of b" in alt and "m 64, name c: name='c' is not allowed" in alt


def test_where_only_the_verdict_counts_a_figure_is_its_text(monkeypatch, outputs, capsys):
    monkeypatch.setenv("DSV4_HEADLESS", "1")
    monkeypatch.setenv("DSV4_FIGURES", "off")
    widgets.explore(draw, CONTROLS, states=[{"m": 128}], name="b")
    assert capsys.readouterr().out == "m 64, name b: 64 of b\n[figure: <b>64</b> & b]\n" and outputs == []
    with pytest.raises(ValueError, match="alt text"):
        style.show(style.new_figure(1.0))


def test_live_controls_call_the_function(monkeypatch, outputs):
    monkeypatch.delenv("DSV4_HEADLESS", raising=False)
    InteractiveShell.instance()
    widgets.explore(draw, CONTROLS, m=128)
    (box,) = outputs
    m, name, readout, picture = box.children
    assert readout.value == "m 128, name a: 128 of a" and "dsv4-readout" in readout._dom_classes
    m.value = 64
    assert readout.value == "m 64, name a: 64 of a"
    assert "&lt;b&gt;64&lt;/b&gt; &amp; a" in picture.value and "<b>" not in picture.value
    name.value = "c"
    assert readout.value == "m 64, name c: name='c' is not allowed: 'a' or 'b'" and picture.value == ""
    name.value = "b"
    assert readout.value == "m 64, name b: 64 of b" and picture.value.startswith("<img ")


PAGE = '<!doctype html><p title="a">it\'s & <b>so</b></p>'


def test_a_frame_holds_a_page_and_lets_it_reach_nothing(monkeypatch, outputs):
    monkeypatch.delenv("DSV4_HEADLESS", raising=False)
    widgets.framed(PAGE, 'a "title"', lambda: pytest.fail("there is a reader"), height=300)
    (bundle,) = outputs
    found = {}
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: found.setdefault(tag, dict(attrs))
    parser.feed(bundle["text/html"])
    assert set(found) == {"iframe"} and bundle["text/plain"] == 'a "title"'
    frame = found["iframe"]
    assert frame["srcdoc"] == PAGE and frame["title"] == 'a "title"' and "height:300px" in frame["style"]
    assert frame["sandbox"] == "allow-scripts"


def test_without_a_reader_a_frame_is_its_figures(monkeypatch, outputs):
    monkeypatch.setenv("DSV4_HEADLESS", "1")
    widgets.framed(PAGE, "t", lambda: [style.new_figure(1.0, 2.0, alt=f"moment {i}") for i in range(2)])
    assert [output.alt for output in outputs] == ["moment 0", "moment 1"]


def test_unknown_controls_and_values_are_named():
    with pytest.raises(ArgumentError, match="tile=1 is not allowed: one of the controls m, name"):
        widgets.explore(draw, CONTROLS, tile=1)
    with pytest.raises(ArgumentError, match="m=65 is not allowed"):
        widgets.explore(draw, CONTROLS, states=[{"m": 65}])
