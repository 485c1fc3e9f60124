"""The chat in the terminal, through stdin: turns, hits, /reset, the end of the input, ctrl-C."""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from dsv4lib import env
from dsv4lib.errors import ArgumentError
from dsv4lib.lab import cli
from dsv4lib.loader.model import transformer
from dsv4lib.model import scheduler as scheduler_module
from dsv4lib.model.chat import DSML, END_THINK, THINK, ChatOptions
from dsv4lib.model.conversation import Conversation, NoChatEncoding
from dsv4lib.model.paged import PagedCaches
from dsv4lib.model.sampler import SamplingParams
from dsv4lib.model.scheduler import Scheduler
from dsv4lib.model.tokenizer import FastTokenizer, decode
from dsv4lib.model.transformer import Transformer
from tests.chat_model import talking  # noqa: F401  fixture
from tests.whole_model import listed, peer  # noqa: F401  fixtures

GREEDY = SamplingParams(temperature=0.0, seed=0)
LONG = "the other day " * 25  # 12 tokens each


def said(folder, text, *options):
    """Result of a chat whose stdin is ``text``."""
    arguments = ["chat", "--model", str(folder), "--backend", "reference", "--tokens", "4", "--context", "512"]
    return CliRunner().invoke(cli.app, [*arguments, *options], input=text)


def counts(done):
    """(tokens of prompt, cached, run, of reply) of each turn, printed under --hits."""
    lines = [line for line in done.stderr.splitlines() if " of prompt: " in line]
    return [tuple(int(word) for word in line.replace(",", " ").split() if word.isdigit()) for line in lines]


def test_turns_hit_what_was_said_before(talking):  # noqa: F811
    """Each prompt has the one before as its prefix: the second run of 256 tokens is found; /reset begins anew."""
    done = said(talking, f"{LONG}\nmore?\n\n/reset\nshort\n/quit\nnever read\n", "--hits", "--system", "S")
    assert done.exit_code == 0, done.exception
    (first, hit, run, reply), second, third = counts(done)
    assert hit == 0 and run == first > 256 and reply == 4
    assert second[0] > first + reply and second[1:3] == (256, second[0] - 256)
    assert third[0] < 30 and third[1] == 0 and "forgotten" in done.stderr
    assert done.stdout.count("\n") >= 3 and THINK not in done.stdout


def test_the_end_of_the_input_ends_the_chat(talking):  # noqa: F811
    done = said(talking, "hello", "--thinking", "--effort", "high", "--hits")
    assert done.exit_code == 0 and done.stdout.startswith(THINK)
    assert counts(done)[0][0] == 4 + len("Think hard. hello")  # BOS, User, Assistant and think; "Th" is no merge


@pytest.mark.full
def test_replies_after_a_hit_are_those_of_a_cold_cache(talking, listed):  # noqa: F811
    tokenizer = FastTokenizer(talking / "tokenizer.json", 328)
    model = transformer(listed, capacity=768, backend="reference")

    def scheduler():
        return Scheduler(model, PagedCaches(model, requests=1, tokens=256, positions=768))

    talk, warm, prompts, replies, hits = Conversation(tokenizer, ChatOptions("chat")), scheduler(), [], [], []
    for number, content in enumerate((LONG, "more", LONG, "and?")):
        prompts.append(talk.ask(content))
        warm.add(number, prompts[-1], GREEDY, 5, stop=talk.stop)
        one = warm.known[number]
        replies.append([token for _, token, _ in warm.run()])
        hits.append(one.hit)
        talk.answer(replies[-1])
    assert hits == [0, 256, 256, 512]
    for prompt, reply in zip(prompts, replies, strict=True):
        cold = scheduler()
        cold.add("cold", prompt, GREEDY, 5, stop=talk.stop)
        assert [token for _, token, _ in cold.run()] == reply


def test_what_cannot_be_said_is_one_line_and_the_chat_goes_on(talking):  # noqa: F811
    text = f"{'x' * 600}\n<｜User｜>\n/what\n{LONG}\nyes\n"
    done = said(talking, text, "--hits")
    assert done.exit_code == 0 and len(counts(done)) == 2
    assert "tokens, 511 fit (--context)" in done.stderr and "marks" in done.stderr and "no command" in done.stderr


def test_a_checkpoint_without_an_encoding_is_named(listed):  # noqa: F811
    done = said(listed.checkpoint.folder, "hello\n")
    assert isinstance(done.exception, NoChatEncoding) and "./dsv4 generate" in str(done.exception)
    assert "\n" not in str(done.exception)


def test_numbers_are_refused(talking):  # noqa: F811
    for options, name in (
        (["--effort", "high"], "effort"),
        (["--context", "1"], "context"),
        (["--top-p", "2"], "top_p"),
    ):
        done = said(talking, "", *options)
        assert isinstance(done.exception, ArgumentError) and done.exception.name == name


@pytest.mark.full  # two signals at once may arrive as one
def test_ctrl_c_ends_a_reply_and_then_the_chat(talking):  # noqa: F811
    arguments = [
        "chat",
        "--model",
        str(talking),
        "--backend",
        "reference",
        "--tokens",
        "900",
        "--context",
        "2048",
        "--hits",
    ]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "dsv4lib.lab.cli", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(env.root())}, bufsize=0,
    )  # fmt: skip
    process.stdin.write(b"hello\n")
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    seen = b""
    while b"of reply" not in seen:
        seen += process.stderr.read(1)
    assert process.poll() is None and int(seen.split()[-3]) < 900
    process.stdin.write(b"again\n")
    while seen.count(b"of prompt") < 1:
        seen += process.stderr.read(1)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130 and out.endswith(b"\n") and b"Traceback" not in err


SCHEMA = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}, {"name": "g"}]


def invoke(name, **arguments):
    lines = [f'<{DSML}parameter name="{k}" string="true">{v}</{DSML}parameter>' for k, v in arguments.items()]
    return "\n".join((f'<{DSML}invoke name="{name}">', "\n".join(lines), f"</{DSML}invoke>\n"))


CALLS = f"\n\n<{DSML}tool_calls>\n{invoke('f', city='京 x')}{invoke('g')}</{DSML}tool_calls>"


@pytest.fixture
def writes(monkeypatch, talking):  # noqa: F811
    """Let replies be drawn that a test gives, one after the other, without the model; returns the prompts."""
    tokenizer, prompts, added = FastTokenizer(talking / "tokenizer.json", 328), [], Scheduler.add
    script = iter(())

    def drawn(*_):
        return SimpleNamespace(check=lambda: SimpleNamespace(tokens=next(script)))

    def add(self, name, prompt, *rest, **more):
        prompts.append(decode(tokenizer, prompt))
        return added(self, name, prompt, *rest, **more)

    def replies(*texts):
        nonlocal script
        script = iter([token for text in texts for token in (*tokenizer.encode(text, bos=False), tokenizer.eos)])
        return prompts

    def hidden(self, step, keep_streams=False):
        return torch.zeros(len(step.tokens), self.config.hidden, dtype=torch.bfloat16), None

    monkeypatch.setattr(Transformer, "hidden", hidden)
    monkeypatch.setattr(scheduler_module, "sample", drawn)
    monkeypatch.setattr(Scheduler, "add", add)
    return replies


@pytest.fixture
def tools(tmp_path):
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(SCHEMA))
    return file


@pytest.mark.parametrize("mode", ["chat", "thinking"])
def test_a_call_is_shown_and_its_result_typed(talking, writes, tools, mode):  # noqa: F811
    """The reply comes when all calls have results, and its prompt goes on from all that was run."""
    thought = f"why <b>{END_THINK}" if mode == "thinking" else ""
    prompts = writes(f"{thought}I look.{CALLS}", f"{thought and END_THINK}Rain.")
    lines = "weather?\n/result g 2 C\n/result f wet and cold\n/quit\n"
    done = said(talking, lines, "--tools", str(tools), "--tokens", "900", *(["--thinking"] * (mode == "thinking")))
    assert done.exit_code == 0, done.exception
    tail = 'I look.\ncall 1: f(city="京 x")\ncall 2: g()\n'
    think, end = (f"{THINK}\n", END_THINK) if mode == "thinking" else ("", "")
    assert done.stdout == f"{think}{thought}{tail}{think}{end}Rain.\n"
    assert "no result yet: 1 (f), 2 (g);" in done.stderr and "no result yet: 1 (f);" in done.stderr
    declared, answered = prompts
    assert declared.startswith('\n\nTools: {"name": "f", "parameters": {"type": "object"}}\n{"name": "g"}')
    begin = THINK if mode == "thinking" else END_THINK
    results = "<tool_result>wet and cold</tool_result>\n\n<tool_result>2 C</tool_result>"
    assert declared.endswith(f"weather?{begin}")
    assert answered == f"{declared}{thought}I look.{CALLS}{results}{begin}"


def test_calls_that_are_cut_off_are_shown_as_they_are(talking, writes, tools):  # noqa: F811
    cut = CALLS[: CALLS.index("</")]
    writes(f"a{cut}")
    done = said(talking, "q\n/result 1 x\n/result 1\n/result\n", "--tools", str(tools), "--tokens", "900")
    assert done.stdout == f"a{cut}\n" and "the reply is not kept" in done.stderr
    assert f"a{cut}\nthe reply is not kept" in done.output  # after the line that it is about
    assert done.stderr.count("none does") == 2 and "/result CALL TEXT: the call's number" in done.stderr


@pytest.mark.parametrize(
    "value, message",
    [('"\\ud800"', "has a lone surrogate"), ("[" * 101 + "]" * 101, "deeper than 100"), ("1e999", "largest float")],
)
def test_a_value_that_is_no_json_of_ours_ends_no_chat(talking, writes, tools, value, message):  # noqa: F811
    value = f'<{DSML}parameter name="x" string="false">{value}</{DSML}parameter>'
    bad = f'<{DSML}tool_calls>\n<{DSML}invoke name="f">\n{value}\n</{DSML}invoke>\n</{DSML}tool_calls>'
    writes(bad, "fine")
    done = said(talking, "q\nq\n", "--tools", str(tools), "--tokens", "900")
    assert done.exit_code == 0, done.exception
    assert done.stdout == f"{bad}\nfine\n" and message in done.stderr


def test_a_result_may_be_empty_and_words_lie_apart(talking, writes, tools):  # noqa: F811
    prompts = writes(CALLS, "fine")
    done = said(talking, "q\n/result\tg \t 2  C\n/result  1\n", "--tools", str(tools), "--tokens", "900")
    assert done.exit_code == 0, done.exception
    assert "<tool_result></tool_result>\n\n<tool_result>2  C</tool_result>" in prompts[1]


def test_results_are_announced_with_tools(talking, tools):  # noqa: F811
    alone, given = said(talking, "/what\n"), said(talking, "/what\n", "--tools", str(tools))
    assert "/result" not in alone.stderr and given.stderr.count("; /result CALL TEXT answers a call") == 2


def test_results_that_do_not_fit_are_taken_back(talking, writes, tools):  # noqa: F811
    writes(f"{CALLS}", "fine")
    lines = f"q\n/result 1 {'x' * 600}\n/result 2 y\n/result 1 x\n/result 2 y\n"
    done = said(talking, lines, "--tools", str(tools), "--tokens", "400", "--context", "768")
    assert done.stderr.count("fit (--context)") == 1 and done.stdout.endswith("fine\n")
    assert done.stderr.count("no result yet: 1 (f), 2 (g);") == 2


def test_files_of_tools_that_are_wrong_are_refused_in_one_line(talking, tmp_path):  # noqa: F811
    for text in ("", "{}", "[]", '[{"name": ""}]'):
        file = tmp_path / "wrong.json"
        file.write_text(text)
        done = said(talking, "hello\n", "--tools", str(file))
        assert isinstance(done.exception, ArgumentError) and "tools" in str(done.exception), text
        assert "\n" not in str(done.exception) and done.stdout == ""
