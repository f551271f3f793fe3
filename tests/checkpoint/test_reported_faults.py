"""Every fault in the table of docs/checkpoints.md has the test that it names."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_tests_of_the_table_exist() -> None:
    text = (ROOT / "docs" / "checkpoints.md").read_text()
    rows = re.findall(r"^\| ([\w-]+/[\w-]+ \d+) \|.*\| (\S+) \|$", text, re.MULTILINE)
    assert len(rows) == len({reported for reported, _ in rows}) == 19
    for reported, named in rows:
        file, test = named.split("::")
        assert f"\ndef {test}(" in (ROOT / file).read_text(), reported
