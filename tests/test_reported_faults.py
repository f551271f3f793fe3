"""Every fault in the tables of the docs has the test that it names."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(("page", "faults"), [("checkpoints", 19), ("throughput", 6)])
def test_the_tests_of_the_table_exist(page: str, faults: int) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    rows = re.findall(r"^\| ([\w-]+/[\w-]+ \d+) \|.*\| (\S+) \|$", text, re.MULTILINE)
    assert len({reported for reported, _ in rows}) == faults
    for reported, named in rows:
        file, test = named.split("::")
        assert f"\ndef {test}(" in (ROOT / file).read_text(), reported
