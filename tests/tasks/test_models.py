"""Model tasks: published sizes without a network, and the law for every head."""

import math
import os
import subprocess
import sys

import pytest
import torch

from fullbatch import Accumulator, TaskError, prove
from fullbatch.tasks import NAMES, Setup, load
from fullbatch.tasks.chunked import HeadInLoss
from fullbatch.tasks.models import CHUNKED, MODELS

transformers = pytest.importorskip("transformers")

TEXT = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DECODER = {**TEXT, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": None}
GPT2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
TINY = {
    "gpt2": ("GPT2LMHeadModel", {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "llama": ("LlamaForCausalLM", DECODER),
    "mistral": ("MistralForCausalLM", DECODER),
    "qwen2": ("Qwen2ForCausalLM", {**DECODER, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", DECODER),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0},
    ),
    "bert": ("BertForMaskedLM", {**TEXT, **NO_DROPOUT, "max_position_embeddings": 32}),
    "distilbert": (
        "DistilBertForSequenceClassification",
        {"vocab_size": 40, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "num_labels": 3}
        | {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0},
    ),
    "vit": (
        "ViTForImageClassification",
        {**TEXT, **NO_DROPOUT, "image_size": 8, "patch_size": 4, "num_labels": 3},
    ),
}


@pytest.fixture
def tiny(tmp_path):
    """A function that writes ``config.json`` of a tiny model and returns what ``--task`` takes."""

    def write(model_type, **changes):
        architecture, sizes = TINY[model_type]
        if model_type == "t5":
            changes = {"decoder_start_token_id": 0, "pad_token_id": 0, **changes}
        config = transformers.AutoConfig.for_model(model_type, **({**sizes, "architectures": [architecture]} | changes))
        config.save_pretrained(tmp_path / model_type)
        return f"hf:{tmp_path / model_type}"

    return write


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # bert: two labels, as transformers counts them; the others: the model cards and papers, tied weights once
        ("bert-base", 109_483_778),
        ("bert-large", 335_143_938),
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-7b", 7_615_616_512),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3.1-8b", 8_030_261_248),
        ("t5-small", 60_506_624),
        ("vit-l-16", 304_326_632),
    ],
)
def test_a_published_model_has_its_published_number_of_parameters(name, parameters):
    task = load(name)
    assert sum(p.numel() for p in task.model.parameters()) == parameters
    assert all(p.is_meta and p.dtype == torch.float32 for p in task.model.parameters())
    assert task.model.training


def test_the_sizes_of_every_built_in_model_are_tested():
    (cases,) = (m.args[1] for m in test_a_published_model_has_its_published_number_of_parameters.pytestmark)
    assert {name for name, _ in cases} == set(MODELS) <= set(NAMES)


def torchvision_or_skip():
    try:
        load("alexnet")
    except TaskError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # https://pytorch.org/vision/stable/models.html#table-of-all-available-classification-weights
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("resnet152", 60_192_808),
        ("vgg16", 138_357_544),
        ("mobilenet_v2", 3_504_872),
        ("efficientnet_b0", 5_288_548),
        ("convnext_base", 88_591_464),
        ("shufflenet_v2_x1_0", 2_278_604),
        ("regnet_x_400mf", 5_495_976),
    ],
)
def test_an_image_classifier_of_torchvision_has_its_published_number_of_parameters(name, parameters):
    torchvision_or_skip()
    assert sum(p.numel() for p in load(name).model.parameters()) == parameters


def test_an_image_classifier_of_torchvision_trains():
    torchvision_or_skip()
    task = load("resnet18", setup=Setup(dtype="bf16"), meta=False)
    assert task.loss(task.model, task.batch(2, torch.Generator().manual_seed(0))).isfinite()
    with pytest.raises(TaskError, match="checkpointing=True: task resnet18 is an image classifier of torchvision"):
        load("resnet18", setup=Setup(checkpointing=True))


def test_a_torchvision_whose_operators_are_made_for_another_torch_still_has_its_classifiers(tmp_path):
    package = tmp_path / "torchvision"
    package.mkdir()
    registered = "".join(
        f"@torch.library.register_fake('torchvision::{name}')\ndef {name}(boxes, scores, iou_threshold): ...\n"
        for name in ("nms", "qnms")
    )
    (package / "__init__.py").write_text(f"import torch\n{registered}from torchvision import models\n")
    (package / "models.py").write_text("def get_model(name, num_classes): return __import__('torch').nn.Linear(3, 4)\n")
    code = "from fullbatch.tasks import load; print(load('resnet50').model)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.stdout.startswith("Linear(in_features=3")


def test_without_torchvision_an_image_classifier_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(
        TaskError, match=r"(?s)--task resnet50: torchvision cannot be imported.*pip install 'fullbatch\[vision\]'"
    ):
        load("resnet50")


def test_without_transformers_a_model_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TaskError, match=r"(?s)transformers cannot be imported.*pip install 'fullbatch\[hf\]'"):
        load("gpt2")


def test_importing_fullbatch_loads_neither_transformers_nor_torchvision():
    code = "import sys, fullbatch.tasks; print({'transformers', 'torchvision', 'peft'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"


@pytest.mark.parametrize("model_type", sorted(TINY))
def test_every_head_keeps_the_law(tiny, model_type):
    task = load(tiny(model_type), setup=None if model_type == "vit" else Setup(seq_len=12), meta=False)
    batch = task.batch(8, torch.Generator().manual_seed(1))
    if batch["labels"].ndim == 2:
        batch["labels"][1, 3:] = -100  # ragged
    proof = prove(
        task.model, task.loss, batch, items=task.items, optimizer=task.optimizer, splits=["2+2+4", "1+7"], dtypes=torch.float64
    )
    assert proof.equal, proof


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "t5", "bert", "vit"])
def test_one_step_trains_real_weights_and_a_random_model_starts_at_the_loss_of_a_guess(tiny, model_type):
    task = load(tiny(model_type), setup=None if model_type == "vit" else Setup(seq_len=12), meta=False)
    before = [p.detach().clone() for p in task.model.parameters()]
    step = Accumulator(task.model, task.optimizer(task.model.parameters()), task.loss, items=task.items, micro_batch=2)
    update = step(task.batch(4, torch.Generator().manual_seed(0)))
    assert update.skipped is None
    assert any(not torch.equal(old, new) for old, new in zip(before, task.model.parameters(), strict=True))
    if model_type != "t5":  # whose initial logits are large
        assert abs(update.loss - math.log(3 if model_type == "vit" else 40)) < 0.5


def test_the_same_seed_makes_the_same_weights(tiny):
    spec = tiny("gpt2")
    one, two, other = (load(spec, seed=seed, meta=False).model for seed in (1, 1, 2))
    assert all(map(torch.equal, one.parameters(), two.parameters()))
    assert not all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.parametrize("model_type", CHUNKED)
def test_a_chunked_loss_is_the_loss_and_has_its_gradient(tiny, model_type, monkeypatch):
    monkeypatch.setattr("fullbatch.tasks.chunked.CHUNK", 7)
    plain = load(tiny(model_type), setup=Setup(seq_len=12), meta=False)
    chunked = load(tiny(model_type), setup=Setup(seq_len=12, chunked_loss=True), meta=False)
    assert any(isinstance(module, HeadInLoss) for module in chunked.model.modules())
    batch = plain.batch(3, torch.Generator().manual_seed(0))
    batch["labels"][1, 4:] = -100
    losses = [task.loss(task.model, batch) for task in (plain, chunked)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    assert list(plain.model.state_dict()) == list(chunked.model.state_dict())
    for one, other in zip(plain.model.parameters(), chunked.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_chunked_loss_keeps_the_law(tiny, monkeypatch):
    monkeypatch.setattr("fullbatch.tasks.chunked.CHUNK", 7)
    task = load(tiny("gpt2"), setup=Setup(seq_len=12, chunked_loss=True), meta=False)
    batch = task.batch(6, torch.Generator().manual_seed(1))
    assert prove(task.model, task.loss, batch, items=task.items, splits=["2+4"], dtypes=torch.float64).equal


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "bert", "vit"])
def test_checkpointing_changes_no_gradient(tiny, model_type):
    gradients, calls = [], [0, 0]
    for checkpointing in (False, True):
        task = load(tiny(model_type), setup=Setup(checkpointing=checkpointing), meta=False)
        for module in task.model.modules():
            module.register_forward_hook(lambda *_, of=int(checkpointing): calls.__setitem__(of, calls[of] + 1))
        task.loss(task.model, task.batch(2, torch.Generator().manual_seed(0))).backward()
        gradients.append([p.grad for p in task.model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    assert calls[1] > calls[0]


def test_dtype_attention_and_sequence_length_reach_the_model(tiny):
    task = load(tiny("llama"), setup=Setup(dtype="bf16", attention="eager", seq_len=20, optimizer="sgd"))
    assert {p.dtype for p in task.model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in task.model.buffers()} == {torch.float32}  # of the rotary positions: not cast
    assert task.model.config._attn_implementation == "eager"
    assert task.batch(3, torch.Generator())["input_ids"].shape == (3, 20)
    assert isinstance(task.optimizer(task.model.parameters()), torch.optim.SGD)
    for attention in ("sdpa", "flash"):
        assert load(tiny("llama"), setup=Setup(attention=attention)).model.config._attn_implementation == "sdpa"


def test_amp_computes_a_model_in_bf16(tiny):
    task = load(tiny("gpt2"), setup=Setup(dtype="amp-bf16"), meta=False)
    seen = []
    task.model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    loss = task.loss(task.model, task.batch(2, torch.Generator()))
    assert (seen, loss.dtype) == ([torch.bfloat16], torch.float32)
    assert {p.dtype for p in task.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("model_type", "options", "told"),
    [
        ("vit", {"seq_len": 64}, "seq_len=64: task .* does not take it: its samples are images"),
        ("gpt2", {"seq_len": 33}, "seq_len=33: task .* has 32 positions\nhint: seq_len=32 or less"),
        ("llama", {"seq_len": 1}, "seq_len=1: task .* predicts the next token: it must be at least 2"),
        ("bert", {"chunked_loss": True}, r"chunked_loss=True: task .* \(bert\) does not take it\nhint: .*gpt2, llama"),
        ("vit", {"chunked_loss": True}, r"chunked_loss=True: task .* \(vit\) does not take it"),
    ],
)
def test_an_option_that_a_model_cannot_take_is_named(tiny, model_type, options, told):
    with pytest.raises(TaskError, match=told):
        load(tiny(model_type), setup=Setup(**options))


def test_a_rotary_model_may_be_longer_than_it_was_trained(tiny):
    task = load(tiny("llama", max_position_embeddings=16), setup=Setup(seq_len=24), meta=False)
    assert task.loss(task.model, task.batch(1, torch.Generator())).isfinite()


def test_weights_are_loaded_from_a_directory(tiny):
    spec = tiny("gpt2")
    made = load(spec, seed=3, meta=False).model
    made.save_pretrained(spec.removeprefix("hf:"))
    loaded = load(spec, seed=4, setup=Setup(weights=True)).model
    assert all(map(torch.equal, made.parameters(), loaded.parameters()))
    assert loaded.training


def test_an_unknown_head_is_told_with_the_known_ones(tiny):
    for architectures, named in (["BertModel"], "BertModel"), (None, "no architecture"):
        with pytest.raises(TaskError, match=f"(?s)its config.json names {named}, which .*ForCausalLM, ForMaskedLM"):
            load(tiny("bert", architectures=architectures))


def test_a_model_that_cannot_be_fetched_says_what_else_to_give(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    told = r"(?s)--task hf:someone/model: its configuration cannot be read.*--task hf:DIR\), set HF_HOME .*--from modelscope"
    with pytest.raises(TaskError, match=told):
        load("hf:someone/model")
    with pytest.raises(TaskError, match="its configuration cannot be read"):
        load(f"hf:{tmp_path}")  # no config.json there
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(TaskError, match=r"(?s)hub='modelscope': modelscope cannot be imported.*pip install modelscope"):
        load("hf:someone/model", setup=Setup(hub="modelscope"))


@pytest.mark.parametrize(
    ("typed", "near"), [("qwen2.5-1.5", "qwen2.5-1.5b"), ("bert_large", "bert-large"), ("resnet-50", "resnet50")]
)
def test_a_misspelt_name_is_told_the_nearest(typed, near):
    with pytest.raises(TaskError, match=rf"--task {typed}: must be one of .*\nhint: did you mean --task {near}\?"):
        load(typed)
