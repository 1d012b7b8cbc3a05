"""Options of a task: dtype and optimizer for any, the model's own where the task takes them."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import mse_loss

from fullbatch import Accumulator, InvalidArgument, Task
from fullbatch.errors import OptimizerError
from fullbatch.tasks import OPTIMIZERS, Setup, apply, load, named_optimizer
from fullbatch.tasks.optimizers import AdamW8bitStates


def small(**changes):
    data = [(torch.full((4,), float(i)), torch.ones(1)) for i in range(8)]
    parts = {"model": nn.Linear(4, 1), "loss": lambda model, micro: mse_loss(model(micro[0]), micro[1]), "data": data}
    return Task(**(parts | changes))


def trained(task, micro_batch=2):
    optimizer = task.optimizer(task.model.parameters())
    step = Accumulator(task.model, optimizer, task.loss, items=task.items, micro_batch=micro_batch)
    return step(task.batch(6, torch.Generator().manual_seed(0))), optimizer


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"seq_len": 0}, "seq_len=0 must be a whole number, at least 1\nhint: seq_len=512"),
        ({"seq_len": 2.5}, "seq_len=2.5 must be a whole number"),
        ({"seq_len": True}, "seq_len=True must be a whole number"),
        ({"dtype": "amp16"}, r"(?s)dtype amp16: must be one of fp32, bf16, amp-bf16, amp-fp16.*did you mean amp-\w+16\?"),
        ({"optimizer": "adamw8bit"}, r"(?s)optimizer adamw8bit: must be one of sgd, .*did you mean adamw-8bit\?"),
        ({"attention": "flsh"}, r"(?s)attention flsh: must be one of eager, sdpa, flash.*did you mean flash\?"),
        ({"hub": "modelscop"}, r"(?s)hub modelscop: must be one of huggingface, modelscope.*did you mean modelscope\?"),
        ({"foreach": True, "fused": True}, "foreach=True and fused=True: an optimizer has one kernel"),
    ],
)
def test_a_value_that_is_none_of_its_options_is_refused(options, told):
    with pytest.raises(InvalidArgument, match=told):
        Setup(**options)


@pytest.mark.parametrize("spec", ["mlp", "text"])
@pytest.mark.parametrize(
    "options", [{"seq_len": 64}, {"attention": "sdpa"}, {"checkpointing": True}, {"chunked_loss": True}, {"weights": True}]
)
def test_a_task_without_such_a_model_names_the_option_that_it_cannot_take(spec, options):
    ((name, value),) = options.items()
    with pytest.raises(InvalidArgument, match=rf"{name}={value!r}: task {spec} does not take it\nhint: .*make\({name}=...\)"):
        load(spec, setup=Setup(**options))


def test_an_empty_setup_changes_nothing():
    task = small()
    same = apply(task, Setup())
    assert (same.model, same.loss, same.optimizer) == (task.model, task.loss, task.optimizer)


def test_bf16_casts_a_copy_of_the_weights_and_the_floating_point_inputs():
    task = small()
    cast = apply(task, Setup(dtype="bf16"))
    assert {p.dtype for p in cast.model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in task.model.parameters()} == {torch.float32}
    update, _ = trained(cast)
    assert update.skipped is None


@pytest.mark.parametrize(("dtype", "computed"), [("amp-bf16", torch.bfloat16), ("amp-fp16", torch.float16)])
def test_amp_computes_in_the_lower_precision_and_keeps_the_weights(dtype, computed):
    seen = []

    def loss(model, micro):
        outputs = model(micro[0])
        seen.append(outputs.dtype)
        return mse_loss(outputs.float(), micro[1])

    task = apply(small(loss=loss), Setup(dtype=dtype))
    task.loss(task.model, task.batch(2, torch.Generator()))
    assert seen == [computed]
    assert {p.dtype for p in task.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"adamw-8bit"}))
def test_every_named_optimizer_trains(name):
    task = apply(small(), Setup(optimizer=name))
    before = [p.detach().clone() for p in task.model.parameters()]
    _, optimizer = trained(task)
    assert not any(map(torch.equal, before, task.model.parameters()))
    assert type(optimizer).__name__.lower() == name.partition("-")[0]


def test_sgd_momentum_has_momentum_and_a_learning_rate_of_its_own_can_be_given():
    (group,) = named_optimizer("sgd-momentum", 0.3)([nn.Parameter(torch.zeros(2))]).param_groups
    assert (group["momentum"], group["lr"]) == (0.9, 0.3)


def test_foreach_and_fused_reach_the_named_optimizer_and_the_tasks_own():
    for setup in (Setup(foreach=False), Setup(optimizer="adamw", foreach=False)):
        _, optimizer = trained(apply(small(), setup))
        assert [group["foreach"] for group in optimizer.param_groups] == [False]
    for setup in (Setup(fused=True), Setup(optimizer="sgd", fused=True)):
        _, optimizer = trained(apply(small(), setup))
        assert [group["fused"] for group in optimizer.param_groups] == [True]


def test_the_tasks_own_optimizer_keeps_its_groups_and_rates():
    def own(parameters):
        weight, bias = parameters
        return torch.optim.AdamW([{"params": [weight], "lr": 0.5}, {"params": [bias], "weight_decay": 0.0}], lr=0.25)

    optimizer = apply(small(optimizer=own), Setup(foreach=False)).optimizer(small().model.parameters())
    told = [(group["lr"], group["weight_decay"], group["foreach"]) for group in optimizer.param_groups]
    assert told == [(0.5, 0.01, False), (0.25, 0.0, False)]


def test_a_kernel_that_an_optimizer_lacks_is_refused_by_name():
    with pytest.raises(InvalidArgument, match="fused=True: optimizer rmsprop does not take it"):
        apply(small(), Setup(optimizer="rmsprop", fused=True))
    task = apply(small(optimizer=lambda parameters: torch.optim.Rprop(parameters)), Setup(fused=True))
    with pytest.raises(InvalidArgument, match="fused=True: Rprop does not take it"):
        task.optimizer(task.model.parameters())


@pytest.mark.parametrize("without_data", [lambda: torch.device("meta"), FakeTensorMode])
def test_adamw_8bit_has_the_state_of_bitsandbytes_on_tensors_without_data(without_data):
    with without_data():
        large, small_one = nn.Parameter(torch.zeros(65, 100)), nn.Parameter(torch.zeros(4095))
        optimizer = named_optimizer("adamw-8bit")([{"params": [large]}, {"params": [small_one]}])
        for parameter in (large, small_one):
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        first = dict(optimizer.state[large])
        optimizer.step()
    state = optimizer.state[large]
    assert all(state[key] is first[key] for key in state)
    shapes = {key: (value.dtype, tuple(value.shape)) for key, value in state.items() if key != "step"}
    assert shapes == {
        "state1": (torch.uint8, (65, 100)),
        "state2": (torch.uint8, (65, 100)),
        "absmax1": (torch.float32, (26,)),  # 6,500 elements in blocks of 256
        "absmax2": (torch.float32, (26,)),
        "qmap1": (torch.float32, (256,)),
        "qmap2": (torch.float32, (256,)),
    }
    assert {value.dtype for key, value in optimizer.state[small_one].items() if key != "step"} == {torch.float32}


def test_adamw_8bit_never_pretends_to_train(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidArgument, match=r"(?s)neither bitsandbytes nor torchao is installed.*pip install bitsandbytes"):
        named_optimizer("adamw-8bit")([nn.Parameter(torch.zeros(4))])
    with pytest.raises(OptimizerError, match="trains nothing"):
        AdamW8bitStates([nn.Parameter(torch.zeros(4))])


@pytest.fixture
def task_file(tmp_path):
    path = tmp_path / "takes.py"
    path.write_text(
        "import torch\nfrom fullbatch import Task\n\n"
        "def task(name):\n"
        "    return Task(model=torch.nn.Linear(2, 1), loss=lambda m, x: m(x).mean(), data=[torch.ones(2)], name=name)\n\n"
        "def make(seq_len=7, *, checkpointing=False):\n    return task(f'{seq_len} {checkpointing}')\n\n"
        "def make_any(**options):\n    return task(str(options))\n"
    )
    return path


def test_a_users_function_is_given_the_options_that_it_has_arguments_for(task_file):
    assert load(f"{task_file}:make").name == "7 False"
    assert load(f"{task_file}:make", setup=Setup(seq_len=9, checkpointing=True)).name == "9 True"
    assert load(f"{task_file}:make_any", setup=Setup(attention="sdpa", dtype="bf16")).name == "{'attention': 'sdpa'}"
    with pytest.raises(InvalidArgument, match=r"attention='sdpa': task 9 False does not take it"):
        load(f"{task_file}:make", setup=Setup(seq_len=9, attention="sdpa"))
