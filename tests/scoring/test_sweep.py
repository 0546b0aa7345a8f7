"""Every class that transformers lists for text is scored right, or refused with one sentence, as docs/fidelity.md says."""

import pytest

from tools.sweep import LARGEST, expected, listed_classes, measure


@pytest.mark.slow
@pytest.mark.parametrize("listed", listed_classes(), ids=str)
def test_a_class_is_scored_right_or_refused_with_one_sentence(listed):
    found, (kind, part) = measure(listed), expected(listed)
    assert found.kind == kind, found
    assert part in found.reason
    assert found.difference <= LARGEST
    if kind == "refused":
        assert "\n" not in found.reason
