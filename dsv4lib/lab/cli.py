"""The command line of the lab, called by `./dsv4`: run, stages, report, site, test, lint, doctor, lab.

`run` decides its exit code by the table in `verdicts.py`; every other refusal is one red line and exit code 2.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from dsv4lib import env
from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.lab import verdicts
from dsv4lib.lab.day_one import options as of_day_one
from dsv4lib.lab.history import options as of_history
from dsv4lib.lab.nightly import options
from dsv4lib.lab.stage import runs_folder, workspace
from dsv4lib.lab.verdicts import LOOKS

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Read, run, see, verify and speed up the DeepSeek-V4 inference kernels for NVIDIA Blackwell.",
)

EXIT_CODES = "Exit codes: " + "; ".join(f"{code} {name}" for code, name, _ in verdicts.exit_code_table()) + "."


@app.callback(invoke_without_command=True)
def version(
    shown: Annotated[bool, typer.Option("--version", help="print version and source fingerprint")] = False,
) -> None:
    """Read, run, see, verify and speed up the DeepSeek-V4 inference kernels for NVIDIA Blackwell."""
    if shown:
        print(f"dsv4 {env.version()}, source {env.source_fingerprint()}")
        raise typer.Exit


@app.command(epilog=EXIT_CODES)
def run(
    set_name: Annotated[str, typer.Option("--set", help="quick, nightly, b200 or hopper")] = "quick",
    stage: Annotated[
        list[str] | None, typer.Option("--stage", "-s", help="only this stage, or all that match 'fmha_*'")
    ] = None,
    parameter: Annotated[list[str] | None, typer.Option("-p", help="name=value, for every chosen stage")] = None,
    backend: Annotated[str | None, typer.Option(help="auto, native, emulator or reference")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="notebooks at a time [default: usable cores]")] = None,
    memory_gb: Annotated[float | None, typer.Option(min=0.1, help="memory limit of a run [default: 90 %]")] = None,
    negatives: Annotated[bool, typer.Option("--negatives", help="run the injected faults instead")] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="run again what a signal, a crash or a full disk ended"),
    ] = False,
    accept_shrink: Annotated[bool, typer.Option("--accept-shrink", help="it may execute less than last time")] = False,
    without_gpu: Annotated[bool, typer.Option("--without-gpu", help="b200, hopper: run what needs no GPU")] = False,
    require: Annotated[
        str | None,
        typer.Option(help="native: a kernel that does not run on a GPU fails the run [default in b200, hopper]; none"),
    ] = None,
    twice: Annotated[bool, typer.Option("--twice", help="run twice and compare all numbers and figures")] = False,
    out: Annotated[Path | None, typer.Option(help="folder for the runs [default: data/runs]")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="show what would run, and where; run nothing")] = False,
) -> None:
    """Run the stages, judge them and write records and a report (the main job)."""
    from dsv4lib.lab.commands import command

    console = Console(highlight=False)
    wish = command.Wish(
        set_name=set_name,
        stages=list(dict.fromkeys(stage or [])),
        texts=command.assignments(parameter or []),
        backend=backend,
        workers=jobs,
        memory_gb=memory_gb,
        negatives=negatives,
        resume=resume,
        accept_shrink=accept_shrink,
        without_gpu=without_gpu,
        twice=twice,
        out=out.resolve() if out else None,
        plan=plan,
        require=require,
    )
    raise typer.Exit(command.run(wish, console))


app.command(epilog=EXIT_CODES)(options.nightly)
of_history.add(app)
app.command("day-one")(of_day_one.day_one)


@app.command()
def stages(
    as_json: Annotated[bool, typer.Option("--json", help="contracts and last verdicts as JSON")] = False,
) -> None:
    """The ladder: each stage and the number it reached, a table on a terminal, else one name per line."""
    from dsv4lib.lab import records
    from dsv4lib.lab.stage import discover

    found, console = discover(), Console(highlight=False)
    if not as_json and not console.is_terminal:
        for spec in found:
            print(spec.name)
        return
    last = {r.stage: r for r in records.load(runs_folder()) if r.kind == "run"}
    if as_json:
        print(json.dumps([_described(spec, last.get(spec.name)) for spec in found], indent=1))
        return
    from dsv4lib.lab.commands.command import ladder

    console.print(ladder(sorted(found, key=lambda spec: spec.notebook), last))


def _need_clone(command: str) -> None:
    if env.is_installed():
        raise DSV4Error(f"{command} needs a clone of the repository: an installed wheel has no tests and is only read")


def _described(spec: Any, record: Any) -> dict[str, Any]:
    last = {"verdict": record.verdict, "reason": record.reason, "run": record.run_id} if record else None
    return {"name": spec.name, **spec.model_dump(exclude_none=True), "last": last}


@app.command()
def report(
    open_it: Annotated[bool, typer.Option("--open", help="show it in the browser")] = False,
    out: Annotated[Path | None, typer.Option(help="folder of the runs, as `run --out` had it")] = None,
) -> None:
    """Print the path of the newest report."""
    if out is not None and not out.is_dir():
        raise ArgumentError("--out", str(out), "a folder with runs")
    pages = sorted((out.resolve() if out else runs_folder()).glob("*/report/index.html"))
    if not pages:
        there = f" in {out}" if out else ""
        raise DSV4Error(f"there is no report yet{there}: {env.front_door()} run writes one")
    print(os.path.relpath(pages[-1]))
    if open_it:
        import webbrowser

        webbrowser.open(pages[-1].as_uri())


@app.command()
def site(
    out: Annotated[Path, typer.Option(help="folder to make; one that this command made is replaced")] = Path("site"),
    runs: Annotated[
        str | None, typer.Option(help="run whose notebooks are shown [default: the newest whole run, else the newest]")
    ] = None,
) -> None:
    """Publish notebooks, documents and tables of results as a static site that needs no network and no server."""
    from dsv4lib.lab.site import build

    made = build.write_site(out, workspace(), runs)
    print(f"{os.path.relpath(made.index)}: {made.pages} pages, {made.executed} of {made.notebooks} notebooks executed")
    for source, target in [] if env.is_installed() else made.broken:  # a wheel has not every file of a clone
        print(f"dsv4: {source}: its link to {target} leads nowhere", file=sys.stderr)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def test(context: typer.Context) -> None:
    """Run the tests on all cores; every argument goes to pytest (-n 0: in one process).

    --all: also run the tests marked full. --tenth N (0 to 9): also run this tenth of them.
    --mutants N: break the sources N times in a copy, and print what no test notices (--seed S, --minutes M, --only P).
    --corpus: run other people's kernels, after installing their packages beside the lab on first use.
    """
    from dsv4lib.bench.peers import corpus
    from dsv4lib.lab.upkeep import mutants

    _need_clone("test")
    os.chdir(env.root())
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile 800 modules anew: 8 s of 16
    if any(a.partition("=")[0] == "--mutants" for a in context.args):
        raise typer.Exit(mutants.command(context.args))
    arguments = corpus.pytest_arguments(context.args)
    own = any(a.startswith(("-n", "--numprocesses", "--pdb", "--co")) for a in arguments)
    spread = [] if own else ["-n", str(len(os.sched_getaffinity(0))), "--dist", "worksteal"]
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *spread, *arguments])  # signals reach pytest alone


@app.command()
def lint() -> None:
    """Check every stage's contract and notebook, and the code by ruff; warn of words to avoid (exit 1: a problem)."""
    _need_clone("lint")
    from dsv4lib.lab.upkeep import lint as linting

    problems = 0
    for report in linting.reports():
        for line in report.lines:
            print(line)
        print(report.summary)
        problems += report.problems
    raise typer.Exit(1 if problems else 0)


RUNS_ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
Target = Annotated[
    str,
    typer.Argument(help="a Python script of CuTeDSL or cuda-python, then its arguments; or a .ptx, .cu or .toml file"),
]
Given = Annotated[list[str] | None, typer.Argument(help="handed to the script as they are")]
Arch = Annotated[str, typer.Option(help="auto, sm_100a, sm_103a, sm_90a or sm_80")]
Seed = Annotated[int, typer.Option(help="of the random schedule")]
Schedule = Annotated[
    str, typer.Option(help="round_robin, oldest_first, newest_first, adversarial, random or hold:LINE[@WARP][,...]")
]
Checks = Annotated[str, typer.Option(help="off, default, race, sanitize (race, registers, lanes), all; or kinds")]
TimeLimit = Annotated[
    float | None, typer.Option(help="seconds of processor time of one launch, inf: none [default: 1800]")
]
InstructionLimit = Annotated[int | None, typer.Option(help="warp-instructions of one launch [default: 10^10]")]
MemoryLimit = Annotated[
    int | None, typer.Option(help="bytes that the device allocates by itself [default: this machine's memory]")
]
Cores = Annotated[int | None, typer.Option(help="processes that run one launch [default: all usable cores]")]
Described = Annotated[Path | None, typer.Option("--launch", help=".ptx, .cu: launch description [default: FILE.toml]")]
Save = Annotated[Path | None, typer.Option(help=".ptx, .cu: write all tensors after the launches to this .npz file")]
Form = Annotated[str, typer.Option("--format", help="of the report: text, json or sarif")]
Output = Annotated[
    Path | None, typer.Option(help="file of the report [default: text to standard error, json and sarif to output]")
]
Page = Annotated[
    Path | None, typer.Option("--report", help="write an HTML file that shows the launches moment by moment")
]
Describe = Annotated[bool, typer.Option("--describe", help=".ptx, .cu: print a launch description to fill in")]
Replay = Annotated[
    bool, typer.Option("--replay", help=".ptx, .cu: run it again under other schedules; say which change the result")
]


@app.command(context_settings=RUNS_ANYTHING)
def emulate(
    target: Target,
    arguments: Given = None,
    arch: Arch = "auto",
    seed: Seed = 0,
    schedule: Schedule = "round_robin",
    checks: Checks = "default",
    time_limit: TimeLimit = None,
    instruction_limit: InstructionLimit = None,
    memory_limit: MemoryLimit = None,
    cores: Cores = None,
    launch: Described = None,
    save: Save = None,
    form: Form = "text",
    output: Output = None,
    report: Page = None,
    describe: Describe = False,
) -> None:
    """Run a CuTeDSL script, unmodified, or PTX on an emulated GPU. The exit code is the script's (90: a hazard).

    A script runs on this machine with your rights: it can read and write whatever you can. Limits hold for
    each launch; DSV4_EMULATOR_SECONDS, _INSTRUCTIONS, _BYTES and _CORES set them for all. A PTX or CUDA C++ file
    needs a description of its launch (--describe writes one); CUDA C++ needs NVRTC. `sanitize` does the same with
    the race detector, and lists the exit codes.
    """
    settings = {"seed": seed, "schedule": schedule, "checks": checks, "time_limit": time_limit}
    settings |= {"instruction_limit": instruction_limit, "memory_limit": memory_limit, "cores": cores}
    _run_target("dsv4 emulate", target, arguments, arch, settings, launch, save, form, output, report, describe)


@app.command(context_settings=RUNS_ANYTHING)
def sanitize(
    target: Target,
    arguments: Given = None,
    arch: Arch = "auto",
    seed: Seed = 0,
    schedule: Schedule = "round_robin",
    checks: Checks = "sanitize",
    time_limit: TimeLimit = None,
    instruction_limit: InstructionLimit = None,
    memory_limit: MemoryLimit = None,
    cores: Cores = None,
    launch: Described = None,
    save: Save = None,
    form: Form = "text",
    output: Output = None,
    report: Page = None,
    describe: Describe = False,
    replay: Replay = False,
) -> None:
    """Look for races and other hazards in a kernel: PTX, CUDA C++ or a script, on an emulated GPU.

    It is `emulate` with the race detector: exit 0: clean (lints included). 2: wrong arguments or description. 90: a
    check reported an error. 91: a launch was stopped: an impossible access, a deadlock, a limit. 92: the target cannot
    be run. 93: a tensor is not as its description expects. A script's own exit code comes first.
    """
    settings = {"seed": seed, "schedule": schedule, "checks": checks, "time_limit": time_limit}
    settings |= {"instruction_limit": instruction_limit, "memory_limit": memory_limit, "cores": cores}
    wish = (target, arguments, arch, settings, launch, save, form, output, report, describe, replay)
    _run_target("dsv4 sanitize", *wish)


def _run_target(
    command: str, target: str, given: list[str] | None, arch: str, settings: dict[str, Any], launch: Path | None,
    save: Path | None, form: str, output: Path | None, report: Path | None, describe: bool, replay: bool = False,
) -> None:  # fmt: skip
    from dsv4lib.emulator.machine.limits import command_cores
    from dsv4lib.emulator.sanitize import command as sanitizer

    if describe:
        raise typer.Exit(sanitizer.describe(command, target, arch))
    if settings["cores"] is None:
        settings["cores"] = command_cores()
    wish = sanitizer.Wish(command, target, given or [], arch, settings, launch, save, form, output, report, replay)
    raise typer.Exit(sanitizer.run(wish))


@app.command()
def bench(
    what: Annotated[str, typer.Argument(help="emulator, fmha, moe, peers, ops or decode_step")] = "emulator",
    op: Annotated[str, typer.Argument(help="peers: of fmha or moe")] = "fmha",
    cutlass: Annotated[Path | None, typer.Option(help="a CUTLASS checkout: also run NVIDIA's examples")] = None,
    record: Annotated[
        Path | None, typer.Option(help="write the table to this CSV file; ops, decode_step: into this folder")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="fmha, moe: draw the roofline into this PNG file")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="peers: this kernel, ops: this op, decode_step: this class (repeatable)")
    ] = None,
    shape: Annotated[str, typer.Option(help="ops: rows whose shape contains this")] = "",
    providers: Annotated[
        str, typer.Option(help="ops, decode_step: peers whose name contains one of these (commas)")
    ] = "",
    ahead: Annotated[int, typer.Option(min=0, help="ops, decode_step: compile first, in so many processes")] = 0,
    seconds: Annotated[float | None, typer.Option(min=1, help="ops, decode_step: no row starts later")] = None,
    batch: Annotated[str, typer.Option(help="decode_step: requests, with commas between them")] = "1,8,32,128",
    context: Annotated[str, typer.Option(help="decode_step: tokens of each: 4096, 32768, 131072")] = "32768",
    export: Annotated[Path | None, typer.Option(help="ops: pack our kernels into this zip file, time nothing")] = None,
    arch: Annotated[str, typer.Option(help="ops --export: sm_90a, sm_100a or sm_103a")] = "sm_90a",
    counters: Annotated[bool, typer.Option("--counters", help="ops: the GPU's counters (ncu), no times")] = False,
) -> None:
    """emulator: measure its speed here (exit 1 if a floor is missed). fmha, moe: model attention or the MoE on a B200.

    peers: what it and other people's kernels execute and load a tile of keys, peers moe: the same of block-scaled GEMMs
    (exit 1 if a bound is missed); installs their packages beside the lab on first use.

    ops: times of the memory-bound ops on this machine's GPU beside other people's kernels (exit 1 if one of ours is
    wrong, 20 without a GPU: rows are listed, nothing is timed). With --counters: bytes of HBM and L2, issue slots and
    stall reasons of ours and of --providers, by Nsight Compute (exit 21 without it). With --export: compile and
    pack our kernels here, for a machine with a GPU and torch but no CuTe DSL (there: unzip it, run what it prints).

    decode_step: where the time of a decode step of Flash is on an H200, op by op and in classes: ours, others' and the
    floor (exit 1 if one of ours is wrong, 20 without such a GPU). What has no kernel yet says so.
    """
    if what not in ("emulator", "fmha", "moe", "peers", "ops", "decode_step"):
        raise ArgumentError("what", what, "emulator, fmha, moe, peers, ops or decode_step")
    if op not in ("fmha", "moe"):
        raise ArgumentError("op", op, "fmha or moe")
    if cutlass is not None and not (cutlass / "examples").is_dir():
        raise ArgumentError("cutlass", str(cutlass), "the folder of a CUTLASS checkout")
    for name, path in (("record", record), ("figure", figure), ("export", export)):
        if path is not None and not path.parent.is_dir():
            raise ArgumentError(name, str(path), "a file in a folder that exists")
    if what == "peers":
        _need_clone("bench peers")
    from dsv4lib.lab.commands import benches
    from dsv4lib.pages.fmha import peers as fmha_peers
    from dsv4lib.pages.moe_gemm import peers as moe_gemm_peers

    if what == "peers":
        view = {"fmha": fmha_peers, "moe": moe_gemm_peers}[op]
        raise typer.Exit(view.command(record, only or []))
    if what == "decode_step":
        options = {"batch": batch, "context": context, "providers": providers, "ahead": ahead, "seconds": seconds}
        raise typer.Exit(benches.decode_step(only or [], **options, record=record))
    if what == "ops" and export is not None:
        raise typer.Exit(benches.export_ops(export, arch, only or [], shape))
    if what == "ops" and counters:
        raise typer.Exit(benches.count_ops(only or [], shape, providers, record))
    if what == "ops":
        raise typer.Exit(benches.ops(only or [], shape, providers, ahead, seconds, record))
    if what in ("fmha", "moe"):
        getattr(benches, what)(record, figure)
    else:
        raise typer.Exit(0 if benches.emulator(cutlass, record) else 1)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="folder of a checkpoint")],
    folder: Annotated[Path, typer.Argument(help="folder to make")],
    to: Annotated[str, typer.Option(help="mxfp4, nvfp4 or bf16: of the routed experts")],
) -> None:
    """Write a checkpoint in another released format: DeepSeek's MXFP4, NVIDIA's NVFP4 or bf16."""
    from dsv4lib.pages.checkpoint import convert as conversion

    conversion.command(source, folder, to, Console(stderr=True, highlight=False))


@app.command()
def generate(
    text: Annotated[str, typer.Argument(help="what the model continues")],
    model: Annotated[Path | None, typer.Option(help="folder of a checkpoint [default: data/nano]")] = None,
    tokens: Annotated[int, typer.Option(help="how many tokens follow")] = 64,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token each time")] = 0.0,
    top_p: Annotated[float, typer.Option(help="draw from the smallest set of tokens with this probability")] = 1.0,
    seed: Annotated[int, typer.Option(help="of the draws")] = 0,
    backend: Annotated[str, typer.Option(help="auto, native, emulator or reference")] = "auto",
    speculate: Annotated[int, typer.Option(help="drafts a step by the model's draft block, 0 to 7")] = 0,
    tensor: Annotated[int, typer.Option("--tensor-parallel", help="ranks that divide heads and vocabulary")] = 1,
    expert: Annotated[
        int,
        typer.Option(
            "--expert-parallel", help="ranks that divide the routed experts [default: all]", show_default=False
        ),
    ] = 0,
    data: Annotated[int, typer.Option("--data-parallel", help="groups of ranks with requests of their own")] = 1,
    wait: Annotated[float, typer.Option("--rank-timeout", min=1, help="seconds that a rank waits for another")] = 600.0,
) -> None:
    """Continue a text with a DeepSeek-V4 checkpoint: kernels native on Blackwell or Hopper, or emulated; or oracles.

    Several ranks (tensor-parallel x data-parallel) are processes that it starts here, or that torchrun has started;
    rank 0 prints. Ctrl-C ends it (exit 130).
    """
    from dsv4lib.pages.generation import command, serving

    sizes = serving.Sizes(tensor, expert, data, wait)
    options = serving.Options(_checkpoint(model), tokens, temperature, top_p, seed, backend, speculate, sizes)
    command.command(text, options, Console(stderr=True, highlight=False))


def _checkpoint(model: Path | None) -> Path:
    return workspace() / "data" / "nano" if model is None else model


@app.command()
def chat(
    model: Annotated[Path | None, typer.Option(help="folder of a checkpoint that has a chat encoding")] = None,
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    thinking: Annotated[bool, typer.Option("--thinking", help="let the model think before it replies")] = False,
    effort: Annotated[str, typer.Option(help="of thinking: low, high or max")] = "low",
    tokens: Annotated[int, typer.Option(help="most tokens of a reply")] = 512,
    context: Annotated[int, typer.Option(help="most tokens of the conversation")] = 8192,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token each time")] = 0.0,
    top_p: Annotated[float, typer.Option(help="draw from the smallest set of tokens with this probability")] = 1.0,
    seed: Annotated[int, typer.Option(help="of the draws")] = 0,
    backend: Annotated[str, typer.Option(help="auto, native, emulator or reference")] = "auto",
    speculate: Annotated[int, typer.Option(help="drafts a step by the model's draft block, 0 to 7")] = 0,
    hits: Annotated[bool, typer.Option("--hits", help="print how many tokens of each prompt were cached")] = False,
    tools: Annotated[Path | None, typer.Option(help="JSON list of function schemas that the model may call")] = None,
) -> None:
    """Talk with a checkpoint: a message a line; /reset forgets the conversation, /quit or the end of the input ends it.

    A call of a tool is shown, and "/result CALL TEXT" types its result; CALL is its number or the tool's name.
    Ctrl-C ends a reply after the step under way; at the prompt it ends the chat (exit 130).
    """
    from dsv4lib.pages.generation import chat as page
    from dsv4lib.pages.generation import serving

    options = serving.Options(_checkpoint(model), tokens, temperature, top_p, seed, backend, speculate)
    wish = page.ChatWish(system, thinking, effort, context, hits, tools)
    page.command(options, wish, Console(stderr=True, highlight=False))


@app.command()
def new(
    kind: Annotated[str, typer.Argument(help="op or stage")],
    name: Annotated[str, typer.Argument(help="lower-case words joined by underscores")],
) -> None:
    """Write a working op (kernel, oracle, tests, bench rows, stage, notebook) or stage to start from."""
    _need_clone("new")
    from dsv4lib.lab import ladder
    from dsv4lib.lab.upkeep import scaffold

    root = workspace()
    for path in scaffold.write(kind, name, root):
        print(path.relative_to(root))
    ladder.main(root / "README.md")
    tests = f"./dsv4 test tests/ops/{name}; " if kind == "op" else ""
    print(f"\nREADME.md has the stage's row. Next: {tests}./dsv4 run --stage {name}; ./dsv4 lint")


@app.command()
def train(
    model: Annotated[str, typer.Argument(help="nano: the one that is trained here")],
    folder: Annotated[Path, typer.Option(help="folder to make")] = Path("nano-trained"),
    smoke: Annotated[bool, typer.Option("--smoke", help="a smaller model for two minutes, on any CPU")] = False,
    device: Annotated[str | None, typer.Option(help="cuda or cpu [default: cuda; cpu with --smoke]")] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="budget of the loop, compilation included")] = None,
    seed: Annotated[int, typer.Option(min=0, help="of weights, batches and synthetic text")] = 0,
    text: Annotated[Path | None, typer.Option(help="folder with the tarballs [default: fetch them]")] = None,
    registry: Annotated[str | None, typer.Option(help="npm registry to fetch from [default: npm's own]")] = None,
) -> None:
    """Train the nano model on CC0 text and write its checkpoint, FP8 and MXFP4, with the loss curve."""
    from dsv4lib.pages.nano import train as page

    console = Console(stderr=True, highlight=False)
    page.command(
        model, folder, console, smoke=smoke, device=device, seconds=seconds, seed=seed, text=text, registry=registry
    )


@app.command()
def evaluate(
    model: Annotated[Path | None, typer.Argument(help="folder of a checkpoint with bytes as tokens")] = None,
    windows: Annotated[int, typer.Option(min=1, help="held-out windows to judge, 16 at most")] = 1,
    length: Annotated[
        int | None, typer.Option(min=1, max=2048, help="bytes of a window that are used [default: 512; on kernels 64]")
    ] = None,
    variant: Annotated[list[str] | None, typer.Option(help="only this variant (repeatable)")] = None,
    table: Annotated[Path | None, typer.Option(help="CSV file to write")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda, for the reference")] = "cpu",
    backend: Annotated[
        str | None, typer.Option(help="judge modes of the kernels on native, emulator or auto [default: the reference]")
    ] = None,
) -> None:
    """What each precision and selection costs: bits per byte, KL, greedy agreement, on the reference or on kernels."""
    from dsv4lib.pages.nano import evaluate as page

    console = Console(stderr=True, highlight=False)
    size = length or (512 if backend is None else 64)
    given = {"names": variant or [], "table": table, "device": device, "backend": backend}
    if not page.command(model, console, windows=windows, length=size, **given):
        raise typer.Exit(1)


@app.command()
def doctor() -> None:
    """Print versions, which back ends work here, and the fix for what does not."""
    from dsv4lib.lab.commands import doctor as checks

    raise typer.Exit(checks.main())


@app.command()
def lab(
    notebook: Annotated[str | None, typer.Argument(help="the notebook to open first")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8888,
    browser: Annotated[bool, typer.Option(help="open a browser window")] = True,
) -> None:
    """Open JupyterLab on 127.0.0.1 with a token: a random one, or what JUPYTER_TOKEN says."""
    from dsv4lib.lab.commands import jupyter

    jupyter.main(notebook or jupyter.FIRST_NOTEBOOK, port, browser)


def sanitize_main() -> None:
    """Entry point of ``dsv4-sanitize``: ``dsv4 sanitize`` with the same arguments."""
    sys.argv = ["dsv4", "sanitize", *sys.argv[1:]]
    main()


def main() -> None:
    """Entry point: a refusal or a full disk is one red line, never a traceback; Ctrl-C is quiet."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # `run` has handlers of its own while notebooks run
    try:
        app(prog_name="dsv4")
    except DSV4Error as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(Text(f"dsv4: {error}", style="red"))
        sys.exit(getattr(error, "exit_code", 2))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package == "dsv4lib":
            raise
        text = f"dsv4: this command needs the package {package}: {env.install()}"
        Console(stderr=True, highlight=False, soft_wrap=True).print(Text(text, style="red"))
        sys.exit(2)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full and error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        text = f"dsv4: {error.filename}: {error.strerror}"
        if full:
            text = "dsv4: no space left on device; free some, then go on with the same command and --resume"
        Console(stderr=True, highlight=False, soft_wrap=True).print(Text(text, style="red"))
        sys.exit(LOOKS[verdicts.Verdict.DISK_FULL].code if full else 2)
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    main()
