"""Writes `docs/demo.svg`: the screen of `supervise demo`, for the README.

    python docs/recording.py

Runs the demo on a terminal of 100 columns and draws what it prints. Takes one to three minutes and
leaves nothing else behind.
"""

from __future__ import annotations

import io
import os
import pty
import re
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

TARGET = Path(__file__).with_name("demo.svg")
COLUMNS = 100
FONT_FACES = re.compile(r"\s*@font-face \{\{.*?\}\}", re.DOTALL)  # no file from another host


def screen(run: Path) -> tuple[int, str]:
    """Run the demo on a pseudo-terminal; return its exit code and what it printed."""
    printed = bytearray()

    def read(fd: int) -> bytes:
        data = os.read(fd, 1 << 16)
        printed.extend(data)
        return data

    os.environ |= {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    status = pty.spawn([sys.executable, "-m", "supervise", "demo", "--run-dir", str(run)], read)
    return os.waitstatus_to_exitcode(status), printed.decode("utf-8", "replace")


def main() -> int:
    with tempfile.TemporaryDirectory(dir=".", prefix="demo-") as folder:
        code, text = screen(Path(os.path.relpath(folder)) / "run")
    if code:
        return code
    for path in (Path(folder).absolute() / "run", Path(os.path.relpath(folder)) / "run"):
        text = text.replace(str(path), "runs/demo")
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), highlight=False)
    console.print(Text.from_ansi(text.replace("\r\n", "\n")))
    code_format = FONT_FACES.sub("", CONSOLE_SVG_FORMAT)
    console.save_svg(str(TARGET), title="supervise demo", code_format=code_format, unique_id="demo")
    return 0


if __name__ == "__main__":
    sys.exit(main())
