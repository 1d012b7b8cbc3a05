"""Tasks: the built-in ones are what they say, a user's own loads or is told what it lacks."""

import math
import textwrap

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from fullbatch import Task, TaskError
from fullbatch.tasks import load


def parts(**changes):
    return {
        "model": nn.Linear(2, 1),
        "loss": lambda model, micro: mse_loss(model(micro[0]), micro[1]),
        "data": [(torch.zeros(2), torch.zeros(1))] * 5,
    } | changes


def test_the_same_seed_makes_the_same_weights_and_data():
    for name in ("mlp", "text"):
        one, two, other = load(name, seed=1), load(name, seed=1), load(name, seed=2)
        assert all(map(torch.equal, one.model.parameters(), two.model.parameters()))
        assert not all(map(torch.equal, one.model.parameters(), other.model.parameters()))
        first, second = (task.batch(4, torch.Generator().manual_seed(3)) for task in (one, two))
        assert all(torch.equal(first[key], second[key]) for key in first)


def test_mlp_is_the_same_problem_for_every_seed_and_has_ragged_items():
    batches = [load("mlp", seed=seed).batch(400, torch.Generator().manual_seed(0)) for seed in (0, 1)]
    assert torch.equal(batches[0]["labels"], batches[1]["labels"])
    assert 0.2 < (batches[0]["labels"] == -100).float().mean() < 0.3


def documents(pieces):
    """The documents that ``pieces`` were cut from: a short one ends a document."""
    whole = [b""]
    for piece in pieces:
        labelled = (piece["labels"] != -100).sum()
        whole[-1] += bytes(piece["bytes"][:labelled].tolist())
        if labelled < 128:
            whole.append(b"")
    return whole


def test_text_has_a_million_parameters_and_no_passage_of_100_bytes_on_both_sides():
    task = load("text")
    assert 0.95e6 < sum(p.numel() for p in task.model.parameters()) < 1.15e6

    train, held_out = (documents(data) for data in (task.data, task.held_out))
    seen = {document[at : at + 100] for document in train for at in range(len(document) - 99)}
    assert not any(document[at : at + 100] in seen for document in held_out for at in range(len(document) - 99))
    assert 0.05 < len(task.held_out) / len(task.data) < 0.2
    assert task.unit == ("bits per byte", 1 / math.log(2))


def test_text_labels_are_the_next_bytes_of_the_documents():
    from pydoc_data.topics import topics

    task = load("text")
    whole = "\0".join(topics.values()).encode()
    for sample in task.data[:: len(task.data) // 20]:
        labelled = sample["labels"] != -100
        joined = [*sample["bytes"][labelled].tolist(), sample["labels"][labelled][-1].item()]
        assert bytes(joined) in whole
        assert torch.equal(sample["bytes"][labelled][1:], sample["labels"][labelled][:-1])


def test_text_is_causal():
    task = load("text")
    sample = task.batch(1, torch.Generator().manual_seed(0))["bytes"]
    changed = sample.clone()
    changed[0, 60:] = 7
    with torch.no_grad():
        one, other = task.model(sample), task.model(changed)
    torch.testing.assert_close(one[0, :60], other[0, :60])
    assert not torch.allclose(one[0, 61], other[0, 61])


def test_batches_take_every_sample_once_an_epoch():
    task = Task(**parts(data=[torch.tensor(i) for i in range(10)]))
    stream = task.batches(4, torch.Generator().manual_seed(0))
    seen = torch.cat([next(stream) for _ in range(5)]).tolist()  # two epochs
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))


def test_a_batch_larger_than_the_data_repeats_it():
    task = Task(**parts(data=[torch.tensor(i) for i in range(3)]))
    assert len(task.batch(7, torch.Generator().manual_seed(0))) == 7


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": "bert"}, r"Task\(model=...\) is str: it must be a torch.nn.Module"),
        ({"loss": 3}, r"Task\(loss=...\) is int: it must be a function"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, r"Task\(optimizer=...\) is SGD: it must be a function"),
        ({"data": None}, "neither data nor make_batch"),
        ({"make_batch": lambda samples, generator: None}, "both data and make_batch"),
        ({"data": iter([])}, r"must have len\(data\) and data\[i\]"),
        ({"data": []}, r"Task\(data=...\) is empty"),
        ({"held_out": []}, r"Task\(held_out=...\) is empty"),
    ],
)
def test_a_task_that_lacks_a_part_says_which(changes, told):
    with pytest.raises(TaskError, match=told):
        Task(**parts(**changes))


@pytest.fixture
def task_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        textwrap.dedent("""
        import torch
        from neighbour import WIDTH
        from fullbatch import Task

        def make():
            data = [(torch.randn(WIDTH), torch.randn(1)) for _ in range(20)]
            def loss(model, micro):
                return torch.nn.functional.mse_loss(model(micro[0]), micro[1])
            return Task(model=torch.nn.Linear(WIDTH, 1), loss=loss, data=data)

        def nothing():
            pass

        def wants(argument):
            pass

        def broken():
            return Task(model=3)
        """)
    )
    (tmp_path / "neighbour.py").write_text("WIDTH = 3\n")
    return path


def test_a_users_function_is_loaded_with_its_neighbours(task_file):
    task = load(f"{task_file}:make")
    x, y = task.batch(4, torch.Generator().manual_seed(0))
    assert (x.shape, y.shape) == ((4, 3), (4, 1))


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("mpl", r"must be one of mlp, text, .*, or file.py:function\nhint: did you mean --task mlp\?"),
        ("nowhere.py:make", "there is no file nowhere.py"),
        ("nowhere.py", "must be one of mlp, text, .*, or file.py:function"),
        ("FILE:makes", r"has no function 'makes'\nhint: it has make, nothing, wants, broken"),
        ("FILE:nothing", "returned NoneType: the function must return a fullbatch.Task"),
        ("FILE:wants", r"fails: TypeError: wants\(\) missing 1 required positional argument"),
    ],
)
def test_a_task_that_cannot_be_loaded_says_why(task_file, spec, told):
    with pytest.raises(TaskError, match=told):
        load(spec.replace("FILE", str(task_file)))


def test_an_error_inside_the_users_function_is_told_with_its_line(task_file):
    with pytest.raises(TaskError, match=r"(?s)fails: TypeError: .*missing 1 required .*\(line 19 of .*mine.py\)") as caught:
        load(f"{task_file}:broken")
    assert isinstance(caught.value.__cause__, TypeError)
