"""The fitted order of growth, on curves whose order is known."""

from types import SimpleNamespace

import pytest

from fullbatch.experiments.stretch import stretch

GiB = 2**30
LENGTHS = [512, 1024, 2048, 4096, 8192]


def _predict(bytes_of):
    def predict(attention, seq_len):
        micro = bytes_of(seq_len)
        verdict = SimpleNamespace(
            fits=micro < 24 * GiB, room_bytes=0, num_alloc_retries=0, card="a card", usable_bytes=24 * GiB
        )
        return SimpleNamespace(
            verdict=verdict,
            stages=[
                SimpleNamespace(micro_batch=1, peak_allocated_bytes=micro),
                SimpleNamespace(micro_batch=0, peak_allocated_bytes=14 * GiB),  # the step
            ],
            peak_allocated_bytes=max(micro, 14 * GiB),
            peak_reserved_bytes=max(micro, 14 * GiB),
            parts={"weights": 1, "optimizer state": 1, "unusable": 0},
            largest_free_bytes=0,
            settings={},
            evidence=None,
        )

    return predict


@pytest.mark.parametrize(
    ("bytes_of", "order", "share"),
    [
        (lambda length: 3 * GiB + 5 * 2**20 * length, "linear", 0.0),
        (lambda length: max(12 * GiB, 9 * GiB + 5 * 2**20 * length), "linear", 0.0),  # a floor, below it nothing shows
        (lambda length: max(4 * GiB, 3 * GiB + 1000 * length**2), "quadratic", 1.0),
        (lambda length: 3 * GiB + 2**20 * length + 64 * length**2, "between", 64 * 8192 / (2**20 + 64 * 8192)),
    ],
)
def test_the_order_of_a_known_curve(bytes_of, order, share):
    (growth,) = stretch(_predict(bytes_of), attentions=["eager"], seq_lens=LENGTHS).growth
    assert growth.order == order
    assert growth.quadratic_share == pytest.approx(share, abs=0.01)


def test_two_lengths_show_no_order():
    (growth,) = stretch(_predict(lambda length: length), attentions=["eager"], seq_lens=[1, 2]).growth
    assert growth.order == "unknown"
