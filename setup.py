"""Build a wheel with a workspace in it. Stages lie beside the package in a clone, inside it in a wheel."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

WORKSPACE = Path("dsv4lib") / "workspace"
FOLDERS = ("notebooks", "stages", "data")
FILES = ("README.md", "pyproject.toml", "requirements.lock")
LEFT_OUT = ("runs", "templates", "__pycache__", ".*")  # made here, of no use without a clone, or hidden


class BuildWithWorkspace(build_py):
    """Copy notebooks, stages and data into the wheel's package. An editable install keeps using the clone's."""

    def run(self):
        """Build the package, then add the workspace."""
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / WORKSPACE
        shutil.rmtree(target, ignore_errors=True)
        for folder in FOLDERS:
            shutil.copytree(folder, target / folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for name in FILES:
            shutil.copy(name, target / name)


setup(cmdclass={"build_py": BuildWithWorkspace})
