"""Runs whenever a Python of this environment starts; openforge/software.py puts it there.

The package index has torchvision built for CUDA. Beside a CPU build of torch its compiled part cannot be loaded, and
`import torchvision` then dies because two operators of that part do not exist. Where it cannot be loaded they are
declared here, without an implementation: image processors use the transforms in plain Python only.
"""

import importlib.util
import sys
from pathlib import Path


class _BeforeTorchvision:
    """A finder that finds nothing: it is asked before torchvision is imported, once."""

    def find_spec(self, name, path=None, target=None):
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        if found is not None:
            self._declare(Path(found.origin).with_name("_C.so"))
        return None

    def _declare(self, compiled):
        import torch

        try:
            torch.ops.load_library(str(compiled))
        except OSError:
            # Declarations last as long as the object does.
            _BeforeTorchvision.library = library = torch.library.Library("torchvision", "FRAGMENT")
            for name in ("nms", "qnms"):
                library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _BeforeTorchvision())
