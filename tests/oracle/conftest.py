"""Checkpoints, oracles and our own decode of them, each made once per family and shared by the tests of this folder.

transformers is imported when the first fixture needs it, not when tests are collected: it takes seconds, and a machine
that runs only other tests need not have it.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from .families import FAMILIES, Family

if TYPE_CHECKING:
    from .oracle import Oracle


class Checkpoint:
    """A family's numbers on disk, in two folders: as the oracle reads them and as our loader does. Written once."""

    def __init__(self, family: Family, folder: Path) -> None:
        from .checkpoints import write_checkpoint

        self.family = family
        self.plain, self.dressed = write_checkpoint(family, folder)

    @cached_property
    def oracle(self) -> "Oracle":
        from .checkpoints import CLASSES, oracle_config
        from .oracle import Oracle

        _, model_class = CLASSES[self.family.oracle]
        return Oracle.load(self.plain, model_class=model_class, config=oracle_config(self.family))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices are slower on more threads, and float32 sums must not depend on the machine's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def quiet_transformers() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


@pytest.fixture(scope="session")
def shelf() -> dict[str, Checkpoint]:
    """Every checkpoint that was made so far, by family: tests ask for families in any order."""
    return {}


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture
def checkpoint(
    family: Family, shelf: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory, quiet_transformers: None
) -> Checkpoint:
    if family.name not in shelf:
        shelf[family.name] = Checkpoint(family, tmp_path_factory.mktemp(family.name))
    return shelf[family.name]


@pytest.fixture
def oracle(checkpoint: Checkpoint) -> "Oracle":
    return checkpoint.oracle
