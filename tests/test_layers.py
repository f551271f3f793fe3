"""What may be imported at which moment. Who may import whom is in pyproject.toml."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    "code",
    [
        "import jaxrel; jaxrel.__version__, dir(jaxrel)",
        "import jaxrel.cli",
        "import jaxrel.provenance",
        "from jaxrel.cli import main; assert main(['--help']) == 0",
        "from jaxrel.cli import main; assert main(['train', '--help']) == 0",
        "from jaxrel.cli import main; assert main(['train', 'absent.yaml']) == 64",
        "from jaxrel.cli import main; assert main(['checkpoint', 'list', 'absent']) == 64",
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(code: str) -> None:
    heavy = "{'jax', 'flax', 'grain', 'orbax'} & {*sys.modules}"
    look = f"; import sys; print('HEAVY', sorted({heavy}))"
    done = subprocess.run(
        [sys.executable, "-c", code + look], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_the_public_names_are_there() -> None:
    import jaxrel
    from jaxrel.train.state import TrainState

    assert jaxrel.TrainState is TrainState
    for name in jaxrel.__all__:
        assert getattr(jaxrel, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        _ = jaxrel.Nonsense
