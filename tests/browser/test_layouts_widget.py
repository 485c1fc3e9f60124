"""A reader's hands: JupyterLab opens 10_layouts in a real browser, a slider moves, the kernel's answer comes back.

Needs a Chromium: `DSV4_CHROMIUM=<executable>`, or one on PATH; without, the test is skipped and says so.
"""

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path
from urllib.parse import urlparse

import pytest

from dsv4lib import env
from dsv4lib.dsl import layout_check, layouts
from dsv4lib.lab.commands import jupyter

NOTEBOOK = "notebooks/10_layouts.ipynb"
QUIET = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
QUIET += ["--disable-component-update", "--disable-sync"]
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
    "notebook-extension/tracker": {"windowingMode": "none"},  # outputs far down the page exist without scrolling
}


ROOT = os.geteuid() == 0  # in containers; browsers and Jupyter need a flag


@pytest.fixture
def chromium() -> str:
    """Path of a Chromium, or a visible skip."""
    named = os.environ.get("DSV4_CHROMIUM")
    if named:
        assert shutil.which(named), f"DSV4_CHROMIUM={named} is not an executable"
        return named
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    return found or pytest.skip("no Chromium: set DSV4_CHROMIUM or put chromium on PATH")


@pytest.fixture
def lab(chromium, tmp_path):
    """URL of a JupyterLab with a token, on a copy of the notebook and with private folders."""
    for setting, values in SETTINGS.items():
        path = tmp_path / f"settings/@jupyterlab/{setting}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    copy = tmp_path / "root" / NOTEBOOK
    copy.parent.mkdir(parents=True)
    shutil.copy(env.root() / NOTEBOOK, copy)  # the browser saves what it runs
    private = {f"JUPYTER_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    private |= {"JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings"), "IPYTHONDIR": str(tmp_path / "ipython")}
    private |= {"JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces"), "PYTHONPATH": str(env.root())}
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("DSV4_")}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    command = jupyter.command(NOTEBOOK, port, browser=False)
    command = [re.sub(r"(--ServerApp\.root_dir=).*", rf"\g<1>{tmp_path}/root", word) for word in command]
    log = (tmp_path / "server.log").open("wb")
    server = subprocess.Popen(command, env=inherited | private | {jupyter.TOKEN: token}, stdout=log, stderr=log)
    try:
        _wait_for(port, server, Path(log.name))
        yield f"http://127.0.0.1:{port}/lab/tree/{NOTEBOOK}?token={token}&reset"
    finally:
        server.terminate()  # Jupyter ends its kernels on SIGTERM
        server.wait(30)


def _wait_for(port: int, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 900
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")


def answer(swizzle: str) -> str:
    """The readout for a 128 x 64 bf16 tile, computed here instead of in the notebook's kernel."""
    tile = layouts.smem_operand(128, 64, "bf16", "K", swizzle)
    before, after = (layout_check.bank_conflicts(t) for t in (layouts.without_swizzle(tile), tile))
    state = f"swizzle {swizzle}, dtype bf16, tile_k 64, tile_m 128"
    return f"{state}: bank conflicts: {before}-way without the XOR, {after}-way with it; 8192 elements"


@pytest.mark.full
def test_moving_a_slider_asks_the_kernel(lab, chromium):
    sync_api = pytest.importorskip("playwright.sync_api")
    flags = [*QUIET, "--no-sandbox"] if ROOT else QUIET
    requests: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.on("request", lambda request: requests.append(request.url))
        page.goto(lab)
        page.locator(".jp-Notebook .jp-CodeCell").first.wait_for(timeout=900_000)
        # the status bar names a kernel only once it is connected; running cells before that opens a dialog instead
        page.get_by_text(re.compile(r"^Python 3.* \| Idle$")).wait_for(timeout=900_000)
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        readout = page.locator(".dsv4-readout")
        sync_api.expect(readout).to_have_text(answer("128B"), timeout=900_000)
        handle = page.locator(".dsv4-control-swizzle .noUi-handle")
        for swizzle in ("64B", "32B"):
            handle.focus()
            page.keyboard.press("ArrowLeft")
            sync_api.expect(readout).to_have_text(answer(swizzle), timeout=900_000)
        picture = page.locator(".dsv4-figure img")
        assert "costs 2-way and 1-way bank conflicts" in picture.get_attribute("alt")
        handle = page.locator(".dsv4-control-tile_k .noUi-handle")
        handle.focus()
        page.keyboard.press("ArrowLeft")  # 32 columns: 64-byte rows, and 32B is still allowed
        sync_api.expect(readout).to_contain_text("4096 elements", timeout=900_000)
        browser.close()
    hosts = {urlparse(url).hostname for url in requests if urlparse(url).scheme not in ("data", "blob", "about")}
    assert hosts == {"127.0.0.1"}
