"""The fork server of the other live tests, with the libraries named as arguments loaded first."""

import contextlib
import importlib
import runpy
import sys
import warnings
from pathlib import Path

with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what libraries say of each other while they are imported
    for name in sys.argv[1:]:
        importlib.import_module(name)

runpy.run_path(str(Path(__file__).parents[1] / "probe" / "live" / "server.py"), run_name="__main__")
