"""Every stage of the workspace through the runner: its quick set is green, each injected fault turns its gate red.

Items come from `discover()`; the last test compares them with the folders under stages/.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4lib import env
from dsv4lib.lab.records import Record
from dsv4lib.lab.run import runner
from dsv4lib.lab.stage import Stage, discover
from dsv4lib.lab.upkeep.lint import lint, unproven
from dsv4lib.lab.verdicts import Verdict
from dsv4lib.ops.compressor import faults as compressor_faults
from dsv4lib.ops.fmha import faults as fmha_faults
from dsv4lib.ops.fmha import wasteful as fmha_wasteful
from dsv4lib.ops.gemm_tile import faults as gemm_tile_faults
from dsv4lib.ops.indexer_logits import faults as indexer_logits_faults
from dsv4lib.ops.mega_moe import faults as mega_moe_faults
from dsv4lib.ops.mla_decode import faults as mla_decode_faults
from dsv4lib.ops.mla_page_table import faults as mla_page_table_faults
from dsv4lib.ops.moe_gemm import faults as moe_gemm_faults
from dsv4lib.ops.swiglu_quant import faults as swiglu_quant_faults
from dsv4lib.ops.turbo4_decode import faults as turbo4_decode_faults
from dsv4lib.ops.turbo4_encode import faults as turbo4_encode_faults
from dsv4lib.pages.cache import run_case as cache_case
from dsv4lib.pages.decode_step import run_case as decode_step_case
from dsv4lib.pages.full_model import run_case as full_model_case
from dsv4lib.pages.mla import run_case as mla_case
from dsv4lib.pages.router_mhc import around_attention, breaks
from dsv4lib.pages.speculation import run_case as speculation_case
from dsv4lib.pages.trends import run_case as trends_case
from dsv4lib.pages.turbo4 import run_case as turbo4_case

STAGES = discover(env.root())
FOUND_IN_KERNELS = {  # by tests of the default run that have no notebook
    *fmha_faults.FAULTS,  # ops/fmha/test_faults.py
    *fmha_wasteful.FAULTS,  # ops/fmha/test_faults.py
    *moe_gemm_faults.FAULTS,  # ops/moe_gemm/test_faults.py
    *moe_gemm_faults.WASTEFUL,  # ops/moe_gemm/test_faults.py
    *compressor_faults.FAULTS,  # lab/test_compressor_figures.py
    *cache_case.FAULTS,  # lab/test_cache_figures.py
    *speculation_case.FAULTS,  # lab/test_speculation_figures.py
    *decode_step_case.FAULTS,  # lab/test_decode_step_figures.py
    *mega_moe_faults.FAULTS,  # ops/mega_moe/test_op.py, lab/test_mega_moe_figures.py
    *mla_page_table_faults.FAULTS,  # ops/mla_page_table/test_op.py
    *mla_decode_faults.FAULTS,  # ops/mla_decode/test_sm100.py
    *mla_case.OWN_FAULTS,  # lab/test_mla_figures.py
    *turbo4_case.OWN_FAULTS,  # lab/test_turbo4_figures.py
    *trends_case.FAULTS,  # lab/test_trends_figures.py
    *turbo4_encode_faults.FAULTS,  # ops/turbo4_encode/test_op.py
    *turbo4_decode_faults.FAULTS,  # ops/turbo4_decode/test_op.py
    *turbo4_decode_faults.RACES,  # ops/turbo4_decode/test_op.py
    *(gemm_tile_faults.FAULTS.keys() - {"pinned_tile"}),  # lab/test_emulator_traces.py; layouts has that name, too
    *indexer_logits_faults.FAULTS,  # ops/indexer_logits/test_kernel.py
    *("NoRowBarrier", "TiesAnyhow", "DropsItsBound"),  # ops/topk/test_kernel.py
    *swiglu_quant_faults.FAULTS,  # ops/swiglu_quant/test_op.py
    *breaks.OF_MHC,  # lab/test_break_tables.py
    *breaks.OF_ROUTER,  # lab/test_break_tables.py
    *full_model_case.FAULTS,  # lab/test_break_tables.py
    *around_attention.FAULTS,  # lab/test_around_attention.py
}


def negatives() -> list:
    """(stage, name of a negative). Further cases: a gate that one before has turned red, a fault found in the kernel.

    The first of each stage never is.
    """
    found = []
    for stage in STAGES:
        red: set[str] = set()
        for negative in stage.negatives:
            further = red.issuperset(negative.metrics) or (red and negative.parameters.get("fault") in FOUND_IN_KERNELS)
            marks = pytest.mark.full if further else ()
            found.append(pytest.param(stage, negative.name, id=f"{stage.name}-{negative.name}", marks=marks))
            red.update(negative.metrics)
    return found


def verified(record: Record) -> None:
    """Pass, skip visibly with the runner's reason, or fail with it."""
    if record.verdict is Verdict.SKIPPED:
        pytest.skip(f"{record.job}: {record.reason}")
    assert record.verdict is Verdict.PASSED, f"{record.job}: {record.verdict}: {record.reason}"


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_quick(stage: Stage, tmp_path: Path) -> None:
    found = runner.run_stage(stage, "quick", runner.Options(out=tmp_path, workers=1))
    assert found and all(record.finished for record in found)
    for record in found:
        page = tmp_path / record.run_id / record.notebook
        assert not record.notebook or page.is_file()
    for record in sorted(found, key=lambda record: record.verdict is Verdict.SKIPPED):
        verified(record)


@pytest.mark.parametrize(("stage", "name"), negatives())
def test_negative(stage: Stage, name: str, tmp_path: Path) -> None:
    record = runner.run_negative(stage, name, runner.Options(out=tmp_path, workers=1, figures=False, slices=True))
    verified(record)
    failed = {gate.metric for gate in record.gates if gate.state == "failed"}
    assert failed.issuperset(stage.negative(name).metrics)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_lint(stage: Stage) -> None:
    assert [str(problem) for problem in lint(stage)] == []


def test_every_gate_is_turned_red_or_says_why_not() -> None:
    """A gate without a negative has a reason."""
    assert unproven(env.root()) == ([], sum(len(stage.gates) for stage in STAGES))


def test_every_stage_is_among_them(request: pytest.FixtureRequest) -> None:
    """Each folder under stages/ has its `test_quick`, so that a stage that does not run is red, not absent."""
    folders = {path.name for path in (env.root() / "stages").iterdir() if path.is_dir()}
    assert {stage.name for stage in STAGES} == folders
    option = request.config.option
    by_id = any("::" in argument for argument in request.config.args)
    if not (option.keyword or option.markexpr or by_id or getattr(option, "lf", False)):  # no selection
        items = [item for item in request.session.items if isinstance(item, pytest.Function)]
        quick = [item for item in items if item.originalname == "test_quick" and item.path == Path(__file__)]
        assert {item.callspec.params["stage"].name for item in quick} == folders
