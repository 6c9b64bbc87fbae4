"""`Accelerator.save_state` and `Fabric.save`: one checkpoint each, whatever files they write.

The first writes a directory of several files, the second a file through a buffer, of which no hook
on `torch.save` knows the name.

Source: accelerate/accelerator.py; lightning/fabric/fabric.py, and `_atomic_save` in
lightning/fabric/utilities/cloud_io.py.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Tuple

from .wrap import around_save

if TYPE_CHECKING:
    from .wrap import Hold


def listen_accelerate(hold: Hold, library: Any) -> None:
    """Stand around `save_state`. Raises AttributeError: this version has no such thing."""
    accelerator = library.Accelerator

    def what(self: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Tuple[str, None]:
        settings = self.project_configuration
        if settings.automatic_checkpoint_naming:
            name = f"checkpoint_{settings.iteration - 1}"  # it has been counted on
            output_dir = os.path.join(str(settings.project_dir), "checkpoints", name)
        return str(output_dir) if self.is_main_process else "", None

    accelerator.save_state = around_save(hold, accelerator.save_state, what)


def listen_fabric(hold: Hold, library: Any) -> None:
    """Stand around `save`. Raises AttributeError: this version has no such thing."""
    fabric = library.Fabric

    def what(self: Any, path: Any, *args: Any, **kwargs: Any) -> Tuple[str, None]:
        return str(path) if self.is_global_zero else "", None

    fabric.save = around_save(hold, fabric.save, what)
