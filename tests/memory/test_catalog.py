"""Cards are found as people type them, and a wrong one is refused with what was meant."""

import pytest

from fullbatch.errors import InvalidArgument
from fullbatch.memory import CARDS, find_card
from fullbatch.units import GiB


@pytest.mark.parametrize("text", ["rtx4090", "RTX-4090", "rtx 4090"])
def test_case_and_dashes_do_not_matter(text):
    assert find_card(text).title == "NVIDIA GeForce RTX 4090"


def test_a_size_is_a_device_with_all_of_it_usable():
    assert find_card("24GiB").usable_bytes == 24 * GiB


def test_every_card_says_where_its_figures_are_from_and_leaves_room():
    for card in CARDS:
        assert find_card(card.name) is card
        assert card.source
        assert 0 < card.usable_bytes < card.total_bytes
    assert len({card.name for card in CARDS}) == len(CARDS)


@pytest.mark.parametrize(
    ("text", "told"),
    [("rtx409", "did you mean rtx4090?"), ("", "fullbatch devices"), ("24 apples", "24 apples"), ("0GiB", "0GiB")],
)
def test_an_unknown_card_is_refused(text, told):
    with pytest.raises(InvalidArgument) as caught:
        find_card(text, "--device")
    assert told in str(caught.value)
