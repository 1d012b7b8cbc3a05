"""Small models of many kinds, each with its loss and one micro-batch; ``scale`` widens them."""

from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Stack(nn.Module):
    """Layers one after the other, each checkpointed or none."""

    def __init__(self, before, layers, after):
        super().__init__()
        self.before, self.layers, self.after = before, nn.ModuleList(layers), after
        self.checkpointed = False

    def forward(self, x):
        x = self.before(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.after(x)


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x_BTD):
        B, T, D = x_BTD.shape
        q, k, v = self.qkv(self.norms[0](x_BTD)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D)
        x_BTD = x_BTD + self.out(mixed)
        return x_BTD + self.mlp(self.norms[1](x_BTD))


class Recurrent(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x_BTD):
        return self.lstm(x_BTD)[0]


def squares(model, x):
    return model(x).float().square().mean()


def of_classes(model, batch):
    return F.cross_entropy(model(batch[0]).float().flatten(0, -2), batch[1].flatten())


def of_transformers(model, batch):
    return model(**batch).loss


def mlp(scale):
    width = 256 * scale
    layers = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)) for _ in "12"]
    return Stack(nn.Identity(), layers, nn.Identity()), squares, torch.randn(256, width)


def text(scale):
    width, x = 128 * scale, torch.randint(0, 256, (4, 128))
    layers = [Block(width, 4) for _ in range(2)]
    return Stack(nn.Embedding(256, width), layers, nn.Linear(width, 256)), of_classes, (x, x)


def lstm(scale):
    width, x = 160 * scale, torch.randint(0, 256, (16, 24))
    return Stack(nn.Embedding(256, width), [Recurrent(width) for _ in "12"], nn.Linear(width, 256)), of_classes, (x, x)


def conv(scale):
    def layer(before, after):
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2))

    width = 32 * scale
    layers = [layer(3, width), layer(width, 2 * width), layer(2 * width, 4 * width)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))
    return Stack(nn.Identity(), layers, head), of_classes, (torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,)))


def _transformers(model, config, scale, **batch):
    import transformers

    settings = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 128 * scale, "intermediate_size": 512 * scale}
    if config == "GPT2Config":
        settings = {"n_layer": 2, "n_head": 4, "n_embd": 128 * scale, "bos_token_id": 0, "eos_token_id": 0}
    if config == "T5Config":
        settings = {"num_layers": 2, "num_heads": 4, "d_model": 128 * scale, "d_ff": 512 * scale, "d_kv": 32 * scale}
        settings["decoder_start_token_id"] = 0
    if config == "LlamaConfig":
        settings["num_key_value_heads"] = 2
    settings |= {"image_size": 64, "patch_size": 8} if config == "ViTConfig" else {"vocab_size": 512}
    made = getattr(transformers, model)(getattr(transformers, config)(**settings))
    return made, of_transformers, batch


def _ids():
    return torch.randint(0, 512, (4, 64))


def bert(scale):
    x = _ids()
    return _transformers("BertForMaskedLM", "BertConfig", scale, input_ids=x, labels=x, attention_mask=torch.ones_like(x))


def gpt2(scale):
    x = _ids()
    return _transformers("GPT2LMHeadModel", "GPT2Config", scale, input_ids=x, labels=x)


def llama(scale):
    x = _ids()
    return _transformers("LlamaForCausalLM", "LlamaConfig", scale, input_ids=x, labels=x)


def t5(scale):
    x = _ids()
    return _transformers("T5ForConditionalGeneration", "T5Config", scale, input_ids=x, labels=x[:, :32].clone())


def vit(scale):
    labels = torch.zeros(4, dtype=torch.long)
    return _transformers("ViTForImageClassification", "ViTConfig", scale, pixel_values=torch.randn(4, 3, 64, 64), labels=labels)


OWN = {"mlp": mlp, "text": text, "lstm": lstm, "conv": conv}
OF_TRANSFORMERS = {"bert": bert, "gpt2": gpt2, "llama": llama, "t5": t5, "vit": vit}
MODELS = OWN | OF_TRANSFORMERS


def checkpointed(model):
    if isinstance(model, Stack):
        model.checkpointed = True
    else:  # what transformers' own gradient_checkpointing_enable does, which 5.x renames
        model.gradient_checkpointing = True
        for module in model.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = True
                module._gradient_checkpointing_func = lambda f, *args: checkpoint(f, *args, use_reentrant=False)
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False


def _half(part):
    return part.bfloat16() if isinstance(part, torch.Tensor) and part.is_floating_point() else part


def in_bfloat16(model, batch):
    if isinstance(batch, dict):
        return model.bfloat16(), {key: _half(part) for key, part in batch.items()}
    return model.bfloat16(), tuple(map(_half, batch)) if isinstance(batch, tuple) else _half(batch)


def under_autocast(loss):
    def cast(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(model, batch)

    return cast


def adamw(parameters):
    return torch.optim.AdamW(parameters)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


VARIANTS = ("plain", "accumulated", "checkpointed", "bfloat16", "autocast", "sgd")


def case(name, variant, scale=1):
    """Arguments and settings of :func:`trace` and :func:`measure_cpu`."""
    torch.manual_seed(0)
    model, loss, batch = MODELS[name](scale)
    if variant == "checkpointed":
        checkpointed(model)
    if variant == "bfloat16":
        model, batch = in_bfloat16(model, batch)
    if variant == "autocast":
        loss = under_autocast(loss)
    settings = {"optimizer": momentum if variant == "sgd" else adamw}
    if variant == "accumulated":
        settings |= {"micro_batches": 4, "max_grad_norm": 1.0}
    return (model, loss, batch), settings


@contextmanager
def without_onednn():
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # flags() would set more, and warn
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before
