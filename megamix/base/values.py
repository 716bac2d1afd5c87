"""Whether a tensor has values."""

import sys

from torch import Tensor


def has_values(x: Tensor) -> bool:
    """Return whether a tensor has values. A meta tensor and a fake one have a shape and a dtype alone."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")  # without it there are none; the import takes a second
    return not (x.is_meta or (fakes is not None and isinstance(x, fakes.FakeTensor)))
