"""What the tests of ep share: one torch thread, and a group that collects every rank's error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ep import Exchange, ExchangeConfig, Kind, Tag, ThreadTransport, Topology, run_ranks

LIMIT_S = 20.0


@pytest.fixture(autouse=True)
def _one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def errors_of():
    """errors_of(size, fn) runs fn on all ranks and returns what each raised (None: nothing) and what came out."""

    def run(size: int, fn: Callable[[ThreadTransport], object]) -> tuple[list[BaseException | None], BaseException]:
        errors: list[BaseException | None] = [None] * size

        def record(transport: ThreadTransport) -> None:
            try:
                fn(transport)
            except BaseException as error:
                errors[transport.rank] = error
                raise

        with pytest.raises(BaseException) as raised:  # noqa: PT011  # the tests say which
            run_ranks(size, record, timeout_s=LIMIT_S)
        return errors, raised.value

    return run


@pytest.fixture
def meet():
    """meet(transport, step, layer=0): one exchange of everybody with everybody under that tag; the ranks."""

    def gather(transport: ThreadTransport, step: int, *, layer: int = 0) -> torch.Tensor:
        return transport.all_gather(torch.tensor([transport.rank]), tag=Tag(step, layer, 0, 0, Kind.CHECK)).wait()

    return gather


@pytest.fixture
def make():
    """make(transport, num_slots=...): a small float64 Exchange on one node, but for what is given."""

    def exchange(
        transport,
        *,
        num_slots,
        hidden=4,
        top_k=2,
        dtype=torch.float64,
        num_tracks=1,
        node_size=None,
        plan=None,
        **config,
    ) -> Exchange:
        config = {"exchange": "exact", "hierarchical": "off", "round_tokens": 8} | config
        return Exchange(
            transport,
            num_slots=num_slots,
            hidden=hidden,
            top_k=top_k,
            dtype=dtype,
            device="cpu",
            config=ExchangeConfig(**config),
            num_tracks=num_tracks,
            topology=Topology(num_ranks=transport.size, node_size=node_size or transport.size),
            plan=plan,
        )

    return exchange
