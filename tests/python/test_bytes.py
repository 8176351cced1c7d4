import pytest
from hypothesis import given
from hypothesis import strategies as st

import reef


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2GiB", 2 << 30), ("1.5 MiB", 3 << 19), ("10", 10), ("7 B", 7), ("3kB", 3000), (" 2 TB ", 2 * 10**12), (5, 5)],
)
def test_reads(text, expected):
    assert reef.parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 gigs", "1e3", "nan", "9223372036854775808", "1 2", "0x10"])
def test_refuses_with_a_sentence(text):
    with pytest.raises(ValueError, match="is not a number of bytes"):
        reef.parse_bytes(text)


@given(st.integers(0, 2**63 - 1))
def test_whole_bytes_are_exact(count):
    assert reef.parse_bytes(f"{count}B") == count


@given(st.integers(-(2**62), 2**62))
def test_what_is_printed_is_near_and_can_be_read(count):
    shown = reef.format_bytes(count)
    assert abs(reef.parse_bytes(shown.removeprefix("-")) - abs(count)) <= abs(count) * 0.006
