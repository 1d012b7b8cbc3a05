"""A simulated device runs out of memory as a real one does, and goes on as a real one does."""

import copy
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from fullbatch.errors import InvalidArgument
from fullbatch.memory import limit
from fullbatch.memory.limit import OutOfMemoryError, _accelerator_limit
from fullbatch.units import MiB

WIDTH, DEPTH, SAMPLES = 512, 6, 2048  # weights 6 MiB; an activation of one sample 2 KiB, of a batch 4 MiB


def megabytes(number):
    return torch.zeros(number, MiB // 4)


def network():
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def backward(model, x, micro_batches):
    for micro in x.chunk(micro_batches):
        (model(micro).square().sum() / len(x)).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_where_one_batch_fails_four_micro_batches_run_with_the_gradient_of_the_batch():
    model, x = network().double(), torch.randn(SAMPLES, WIDTH, dtype=torch.float64)
    right = backward(copy.deepcopy(model), x, 1)
    with limit("100MiB", device="cpu", holding=(model, x)) as memory:
        with pytest.raises(OutOfMemoryError, match=r"out of memory\. Tried to allocate 8\.00 MiB\."):
            backward(model, x, 1)
        model.zero_grad()
        assert memory.allocated_bytes < 23 * MiB  # weights of 12.02 MiB and the batch of 8
        got = backward(model, x, 4)
    for a, b in zip(got, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_memory_can_run_out_in_the_backward_and_comes_back():
    model, x = network(), torch.randn(SAMPLES, WIDTH)
    with limit("1GiB", device="cpu", holding=(model, x)) as memory:
        loss = model(x).square().sum()
        held = memory.reserved_bytes
        del loss
    with limit(held, device="cpu", holding=(model, x)) as memory:
        before = memory.allocated_bytes
        loss = model(x).square().sum()
        with pytest.raises(OutOfMemoryError):
            loss.backward()
        del loss
        model.zero_grad()
        assert memory.allocated_bytes == before
        backward(model, x[:256], 1)


def test_memory_can_run_out_in_the_step_of_an_optimizer():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with limit("20MiB", device="cpu", holding=(model, optimizer)):  # weights, gradients and two moments: 24 MiB
        model(torch.randn(8, WIDTH)).sum().backward()
        with pytest.raises(OutOfMemoryError):
            optimizer.step()


def test_a_checkpointed_model_runs_where_the_plain_one_does_not():
    model, x = network(), torch.randn(SAMPLES, WIDTH)

    def checkpointed():
        checkpoint_sequential(model, 3, x, use_reentrant=False).square().mean().backward()
        model.zero_grad()

    with limit("1GiB", device="cpu", holding=(model, x)) as memory:
        checkpointed()
        needed = memory.peak_reserved_bytes
    with limit(needed, device="cpu", holding=(model, x)):
        with pytest.raises(OutOfMemoryError):
            model(x).square().mean().backward()
        model.zero_grad()
        checkpointed()


def test_what_is_freed_can_be_taken_again():
    with limit("40MiB", device="cpu") as memory:
        for _ in range(8):
            x = megabytes(24)
            assert memory.allocated_bytes == 24 * MiB
            del x
        assert memory.allocated_bytes == 0
        x = megabytes(36)  # the cached 24 MiB go back first
        assert (memory.num_alloc_retries, memory.peak_allocated_bytes) == (1, 36 * MiB)
        del x
        memory.empty_cache()
        assert memory.reserved_bytes == 0


def test_the_same_failure_again_and_again_leaves_nothing_behind():
    with limit("40MiB", device="cpu") as memory:
        x = megabytes(20)
        for _ in range(3):
            with pytest.raises(OutOfMemoryError):
                x + 1, x + 2
            assert memory.allocated_bytes == 20 * MiB


def test_views_and_operators_in_place_take_nothing():
    with limit("40MiB", device="cpu") as memory:
        x = megabytes(16)
        y = x.view(-1)[4:].unsqueeze(0)
        x.add_(1).mul_(2)
        torch.mul(x, 2, out=x)
        assert memory.peak_allocated_bytes == 16 * MiB
        del x
        assert memory.allocated_bytes == 16 * MiB  # the view still holds it
        del y
        assert memory.allocated_bytes == 0


def test_resize_counts_what_it_adds_and_fails_before_it_does():
    with limit("64MiB", device="cpu") as memory:
        x = megabytes(12)
        x.resize_(20, MiB // 4)
        assert (memory.allocated_bytes, memory.peak_allocated_bytes) == (20 * MiB, 32 * MiB)  # old and new at once
        with pytest.raises(OutOfMemoryError):
            x.resize_(60, MiB // 4)
        assert x.shape[0] == 20
        assert memory.allocated_bytes == 20 * MiB


def test_an_output_that_grows_is_counted():
    with limit("64MiB", device="cpu") as memory:
        out = torch.empty(0)
        torch.cat([megabytes(12)], out=out)
        assert memory.allocated_bytes == 12 * MiB
        del out
        assert memory.allocated_bytes == 0


def test_tensors_from_before_count_when_they_are_first_seen():
    x = megabytes(16)
    with limit("64MiB", device="cpu") as memory:
        assert memory.allocated_bytes == 0
        x.sum()
        assert 16 * MiB <= memory.allocated_bytes < 17 * MiB
    with limit("64MiB", device="cpu", holding=[x]) as memory:
        assert memory.allocated_bytes == 16 * MiB


def test_what_is_held_must_fit():
    with pytest.raises(OutOfMemoryError), limit("4MiB", device="cpu", holding=megabytes(16)):
        pass


def test_holding_a_model_and_its_optimizer_counts_shared_tensors_once():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.randn(8, WIDTH)).sum().backward()
    optimizer.step()
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    with limit("1GiB", device="cpu", holding={"model": model, "optimizer": optimizer}) as memory:
        steps = 512 * len(list(model.parameters()))
        assert memory.allocated_bytes == 4 * weights + steps  # weights, gradients, two moments


def test_the_inner_of_two_limits_is_the_tighter_one():
    with limit("80MiB", device="cpu") as outer:
        x = megabytes(16)
        with limit("40MiB", device="cpu", holding=x) as inner, pytest.raises(OutOfMemoryError, match=r"capacity of 40\.00 MiB"):
            x.repeat(3, 1)
        assert inner.allocated_bytes == outer.allocated_bytes == 16 * MiB
        assert outer.peak_allocated_bytes == 64 * MiB
        x.repeat(3, 1)


def test_after_the_limit_and_after_an_error_inside_nothing_is_limited():
    with pytest.raises(KeyError), limit("40MiB", device="cpu"):
        raise KeyError
    megabytes(64)


def test_the_message_adds_up():
    with limit("60MiB", device="cpu"):
        x = megabytes(12)
        with pytest.raises(OutOfMemoryError) as caught:
            x.repeat(5, 1)
    assert str(caught.value) == (
        "Simulated device out of memory. Tried to allocate 60.00 MiB. The device (fullbatch.memory.limit, on the CPU) has a "
        "total capacity of 60.00 MiB of which 48.00 MiB is free. Of the allocated memory 12.00 MiB is allocated by PyTorch, "
        "and 0.00 MiB is reserved by PyTorch but unallocated."
    )


@pytest.mark.parametrize("size", ["", "abc", "0", "-1MiB", "9" * 400 + "GiB", 0, -1, True, 1.5, None])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(InvalidArgument, match="size above 0") as caught, limit(size, device="cpu"):
        pass
    assert f"size {size!r}: must be" in caught.value.message
    assert "512MiB" in caught.value.hint


def test_a_tensor_that_outlives_the_limit_is_given_back_when_it_goes():
    with limit("40MiB", device="cpu") as memory:
        x = megabytes(16)
    assert memory.allocated_bytes == 16 * MiB
    y = x + 1  # no longer counted
    del x
    assert memory.allocated_bytes == 0
    del y


def test_random_numbers_are_those_without_a_limit():
    def drawn():
        torch.manual_seed(0)
        return torch.randn(4), nn.functional.dropout(torch.ones(64)), torch.rand(3)

    free, state = drawn(), torch.get_rng_state()
    with limit("40MiB", device="cpu"):
        limited = drawn()
        assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, free, limited))


def test_another_thread_is_not_limited_and_a_backward_is():
    made = []
    x = torch.zeros(4 * MiB, requires_grad=True)
    with limit("40MiB", device="cpu", holding=x) as memory:
        thread = threading.Thread(target=lambda: made.append(megabytes(64)))
        thread.start()
        thread.join()
        assert memory.allocated_bytes == 16 * MiB
        (2 * x).sum().backward()
        assert memory.allocated_bytes == 32 * MiB  # and its gradient
        with pytest.raises(OutOfMemoryError):
            (2 * x).sum().backward()
    assert made


class FakeCuda:
    """torch.cuda as far as a limit asks it: a card of 1 GiB whose allocator takes only devices with an index."""

    def __init__(self, fraction=1.0):
        self.fraction, self.calls = fraction, []

    def current_device(self):
        return 0

    def get_device_properties(self, device):
        return SimpleNamespace(total_memory=1024 * MiB)

    def get_per_process_memory_fraction(self, device):
        assert device.index is not None
        return self.fraction

    def set_per_process_memory_fraction(self, fraction, device):
        assert device.index is not None
        self.fraction = fraction

    def memory_stats(self, device):
        return {}

    def empty_cache(self):
        self.calls.append("empty_cache")

    def reset_peak_memory_stats(self, device):
        self.calls.append("reset")


def test_on_cuda_the_share_of_the_process_is_set_and_restored(monkeypatch):
    cuda = FakeCuda(fraction=0.5)
    monkeypatch.setattr(torch, "cuda", cuda)
    with suppress(KeyError), _accelerator_limit(256 * MiB, torch.device("cuda")):
        assert cuda.fraction == 0.25
        assert cuda.calls == ["empty_cache", "reset"]  # what the cache held before is no part of the limit
        raise KeyError
    assert cuda.fraction == 0.5


def test_a_limit_above_what_the_device_has_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "cuda", FakeCuda())
    with (
        pytest.raises(InvalidArgument, match=r"size 2\.00 GiB: cuda:0 has 1\.00 GiB"),
        _accelerator_limit(2048 * MiB, torch.device("cuda")),
    ):
        pass
