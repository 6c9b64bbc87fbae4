"""With this directory on PYTHONPATH, `import torch` and the first optimizer take half the time.

Torch imports its compiler with the first optimizer, 0.8 s of CPU, to mark functions that the
compiler is to leave alone. Jobs that compile nothing get a module that marks nothing. What torch
knows of operators without data, on the `meta` device, is another 0.3 s that no job here needs.
"""

import contextlib
import sys
import types

_dynamo = types.ModuleType("torch._dynamo")
_dynamo.disable = lambda function=None, recursive=True, **_: function
_dynamo.graph_break = lambda *_, **__: None
_dynamo.set_stance = lambda *_, **__: contextlib.nullcontext()
sys.modules["torch._dynamo"] = _dynamo
sys.modules["torch._meta_registrations"] = types.ModuleType("torch._meta_registrations")
