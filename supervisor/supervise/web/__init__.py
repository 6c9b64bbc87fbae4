"""The page: all runs of a directory in a browser, their curves, incidents and commands.

It reads run directories as `supervise status` does, and writes nothing into them. What it needs
beyond the supervisor (starlette, uvicorn, numpy: the extra `web`) is imported when it is used.
"""

from __future__ import annotations

from ..exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "curves": "BuildingError, Query, RunCurves, trim_cache",
        "gate": "Gate",
        "pyramid": "Pyramid",
        "run_view": "BOARDS",
        "server": "Page, Settings, serve",
    },
)
