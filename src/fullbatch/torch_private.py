"""What torch keeps private and several modules here need.

What one module alone needs stays in it. ``tests/test_private_torch.py`` lists both, and says what torch took away.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_iter as tree_iter
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

current_autograd_node = torch._C._current_autograd_node
"""The node whose backward runs in this thread, or ``None``."""


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that tells ``storage`` from all others alive, without data too: ``data_ptr`` is 0 for each of those."""
    key: int = storage._cdata
    return key
