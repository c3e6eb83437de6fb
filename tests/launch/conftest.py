from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="session")
def tiny() -> str:
    """Folder of the bundled trained checkpoint."""
    return str(ROOT / "profiles" / "models" / "tiny-v3")
