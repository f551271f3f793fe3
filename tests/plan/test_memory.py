"""What a model in training weighs."""

import pytest

from jaxrel.exit_codes import UsageError
from jaxrel.plan import memory

pytestmark = pytest.mark.core


def test_seventy_billion() -> None:
    """Decimal GB: 140 of bfloat16 parameters, 560 of two moments, 840 with the master copy."""
    made = memory.document(70 * 10**9)
    whole = {"parameters": 140, "gradients": 280, "moments": 560, "master": 280}
    assert made["bytes"] == {kind: size * 10**9 for kind, size in whole.items()}
    assert made["optimizer_bytes"] == 840 * 10**9
    assert made["total_bytes"] == 1260 * 10**9
    assert made["bytes_per_device"] == made["bytes"]
    assert "10**9" in made["definition"] and "float32 gradients" in made["definition"]


def test_sixteen_bytes_a_parameter() -> None:
    """ZeRO, arXiv 1910.02054, section 3.1: 16 bytes with gradients of two; 1.9 GB on 64."""
    made = memory.document(7_500_000_000, 64, "bfloat16")
    assert made["total_bytes"] == 16 * 7_500_000_000 == 120 * 10**9
    assert made["total_bytes_per_device"] == 1_875_000_000
    assert "bfloat16 gradients" in made["definition"]


def test_a_share_is_rounded_up() -> None:
    made = memory.document(10, 4)
    assert made["bytes_per_device"] == {
        "parameters": 6,
        "gradients": 12,
        "moments": 24,
        "master": 12,
    }
    assert made["total_bytes_per_device"] == 54


def test_the_table() -> None:
    lines = memory.table(memory.document(70 * 10**9, 64)).splitlines()
    assert lines[0].split() == ["70,000,000,000", "parameters", "GB", "a", "device", "of", "64"]
    assert lines[1].split() == ["bfloat16", "parameters", "140.000", "2.188"]
    assert lines[5].split() == ["total", "1,260.000", "19.688"]
    assert len({len(line) for line in lines[:6]}) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"parameters": 0}, "params: got 0: expected at least 1"),
        ({"parameters": 1, "devices": -2}, "devices: got -2: expected at least 1"),
        ({"parameters": 1, "gradients": "f8"}, "gradients: got 'f8': expected float32 or bfloat16"),
    ],
)
def test_wrong_inputs(wrong: dict, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}$"):
        memory.document(**wrong)
