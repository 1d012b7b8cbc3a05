"""Which private parts of torch are used, where, and whether this torch still has them."""

import ast
from functools import reduce
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

import fullbatch
from fullbatch.torch_private import current_autograd_node, storage_key

SOURCE = Path(fullbatch.__file__).parent

USED = {
    "torch._C._current_autograd_node": {"torch_private", "memory.kernels"},
    "torch._C._ExcludeDispatchKeyGuard": {"memory.semantics"},
    "torch._prims_common.suggest_memory_format": {"memory.cudnn"},
    "torch._subclasses.fake_tensor": {"memory.fake"},
    "torch._subclasses.fake_tensor.FakeTensor": {"memory.fake"},
    "torch._subclasses.fake_tensor.FakeTensorMode": {"memory.fake"},
    "torch.autograd._get_sequence_nr": {"memory.recorder"},
    "torch.utils._python_dispatch.TorchDispatchMode": {"torch_private"},
    "torch.utils._pytree.tree_iter": {"torch_private"},
    "torch.utils._pytree.tree_leaves": {"torch_private"},
    "torch.utils._pytree.tree_map": {"torch_private"},
}
"""Names that begin at ``torch``. A second module that needs one takes it from ``fullbatch.torch_private``."""

ATTRIBUTES = {
    "torch.UntypedStorage._cdata": "torch_private",
    "torch._C.DispatchKeySet": "memory.semantics",
    "torch._C.DispatchKey.AutocastCPU": "memory.semantics",
    "torch._C.DispatchKey.CompositeImplicitAutograd": "memory.semantics",
    "torch.ops.aten.linear.default._op_dk": "memory.semantics",
    "torch.ops.aten.add.Tensor._schema": "memory.recorder",
    "torch.library.Library._destroy": "memory.semantics",
    "torch._subclasses.fake_tensor._DispatchCacheKey": "memory.fake",
    "torch._subclasses.fake_tensor.FakeTensorMode._cache_key": "memory.fake",
    "torch.Tensor._backward_hooks": "prove.precision",
    "torch.cuda.memory._record_memory_history": "memory.backend",
    "torch.cuda.memory._dump_snapshot": "memory.backend",
}
"""What is reached through an object."""


def private_names(path):
    """Names from ``torch`` on with a part that begins with one underscore; aten's operators are not private."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            names = [ast.unparse(node)]
        for name in names:
            private = any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
            if private and name.startswith("torch.") and not name.startswith("torch.ops.") and name != "torch._C":
                yield name


def test_each_private_name_is_listed_and_taken_in_one_place():
    found = {}
    for path in SOURCE.rglob("*.py"):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for name in private_names(path):
            found.setdefault(name, set()).add(module)
    assert found == USED, "list the name in this file's USED; where a second module needs it, take it from torch_private"


@pytest.mark.parametrize("name", [*USED, *ATTRIBUTES])
def test_this_torch_has_each_of_them(name):
    where = USED.get(name) or ATTRIBUTES[name]
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = import_module(".".join(parts[:end]))
            break
        except ImportError:
            continue
    try:
        reduce(getattr, parts[end:], module)
    except AttributeError as error:
        pytest.fail(f"torch {torch.__version__} has no {name}, which fullbatch's {where} uses: {error}")


def test_a_storage_has_one_key_and_no_other_has_it():
    for device in ("cpu", "meta"):
        one, other = (torch.empty(4, device=device) for _ in range(2))
        assert storage_key(one.untyped_storage()) == storage_key(one[1:].untyped_storage())
        assert storage_key(one.untyped_storage()) != storage_key(other.untyped_storage())


def test_the_node_whose_backward_runs_is_known_and_numbered_as_its_forward_was():
    seen = []

    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append(current_autograd_node())
            return grad * 2

    x = nn.Parameter(torch.ones(1))
    assert current_autograd_node() is None
    out = Doubles.apply(x)
    numbered = x.exp()
    assert numbered.grad_fn._sequence_nr() == torch.autograd._get_sequence_nr() - 1
    out.backward()
    assert [node.name() for node in seen] == ["DoublesBackward"]
    assert current_autograd_node() is None
