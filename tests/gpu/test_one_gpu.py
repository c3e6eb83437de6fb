"""One GPU: tokens of graphs, of kernels one by one and of torch; NCCL with itself, captured; ranks as threads.

Nobody has run these: there was no GPU where they were written. On a CPU the same is tested with a pretend device
(`tests/runtime/graphs/test_graphs.py`) and over gloo (`tests/multi_gpu`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from attention_mla.matrix import Fp8Matrix, linear_blocks
from attention_mla.triton_ops import TritonOps
from dbo import DboConfig
from ep.torch_dist import open_store, open_torch_dist
from launch.observe.first_contact import decoded, reference_tokens, tiny_config
from runtime import Engine, SamplingParams
from runtime.bench.group_checks import Bench, group_checks, kernel_checks
from runtime.bench.kernel_case import CaseSize
from runtime.bench.rank_slice import RankSlice
from runtime.bench.slice_config import SliceConfig
from runtime.bench.stages import STAND_IN, by_stage
from runtime.failure.checkup import Outcome, look
from runtime.forward.device_time import DEVICE_CLOCKS
from runtime.graphs.graph_device import CudaGraphs, Recording
from runtime.graphs.graphs import GraphRunner
from runtime.model.model_config import read_model_config
from runtime.thread_ranks import ThreadRanks

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]
CUDA = torch.device("cuda")
PROMPTS = ([5, 6, 7, 400], [11], [9] * 40)


def tokens_of(config: Any, *, steps: int = 24) -> tuple[list[list[int]], Any]:
    """Greedy tokens, and the runner of rank 0."""
    ranks = ThreadRanks(config, drafter=None, on_plan=None, on_progress=None)
    with Engine(config, ranks=ranks) as engine:
        outputs = engine.generate([*PROMPTS], SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True))
    return [list(output.token_ids) for output in outputs], ranks.workers[0].launcher.runner


def test_graphs_kernels_and_torch_decode_the_same_tokens():
    wanted = reference_tokens()
    assert decoded(CUDA, "reference") == wanted
    assert decoded(CUDA, "triton") == wanted
    assert decoded(CUDA, "triton", eager=False) == wanted


def test_warm_steps_neither_wait_nor_allocate():
    config = tiny_config("cuda", "triton", eager=False)
    _, runner = tokens_of(replace(config, graphs=replace(config.graphs, debug_sync=True)), steps=64)
    assert isinstance(runner, GraphRunner)
    assert runner.tally.words == ""


def test_two_tracks_in_a_graph_decode_what_one_does():
    config = tiny_config("cuda", "triton", eager=False)
    cut = DboConfig(dbo="on", dbo_decode_token_threshold=1, dbo_prefill_token_threshold=1)
    wanted, _ = tokens_of(config)
    found, runner = tokens_of(replace(config, overlap=cut))
    assert found == wanted
    assert runner.tally.replayed > 0


def test_the_devices_clock_goes_on_by_about_what_events_say():
    cell, clock = torch.zeros((), dtype=torch.int64, device=CUDA), DEVICE_CLOCKS["cuda"]()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    clock.add(cell, -1)
    cell.zero_()
    begin.record()
    clock.add(cell, -1)
    torch.cuda._sleep(20_000_000)
    clock.add(cell, 1)
    end.record()
    end.synchronize()
    assert int(cell) / 1e6 == pytest.approx(begin.elapsed_time(end), rel=0.1)


@pytest.mark.parametrize(("num_outputs", "dim"), [(2112, 7168), (24576, 1536), (7168, 16384)])
def test_torchs_product_of_fp8_blocks_is_right_or_not_taken(num_outputs, dim, record_property):
    noise = torch.Generator(device=CUDA).manual_seed(0)
    values_ND = torch.randn(num_outputs, dim, generator=noise, device=CUDA).to(torch.float8_e4m3fn)
    scales_QG = torch.rand(-(-num_outputs // 128), dim // 128, generator=noise, device=CUDA) + 0.01
    matrix, ops = Fp8Matrix(values_ND=values_ND, scales_QG=scales_QG), TritonOps()
    x_TD = torch.randn(64, dim, generator=noise, device=CUDA, dtype=torch.bfloat16)
    found_TN = ops.linear(x_TD, matrix)
    [trial] = ops.chosen.trials.values()
    record_property("trial", repr(trial))
    weight_ND = linear_blocks(
        torch.eye(dim, device=CUDA), torch.ones(dim, dim // 128, device=CUDA), values_ND, scales_QG
    ).T
    wanted_TN = x_TD.double() @ weight_ND.T
    assert float((found_TN.double() - wanted_TN).abs().max() / wanted_TN.abs().max()) < 0.05


def test_two_ranks_as_threads_of_one_gpu_decode_what_one_rank_does():
    config = tiny_config("cuda", "triton")
    assert tokens_of(replace(config, ranks=2))[0] == tokens_of(config)[0]


def test_a_planted_item_ends_the_recording():
    x = torch.ones(4, device=CUDA)
    graphs = CudaGraphs(CUDA)
    with graphs.lane(), pytest.raises(RuntimeError):
        Recording(graphs).record(lambda: x.sum().item(), None)


@contextmanager
def alone_over_nccl() -> Iterator[Any]:
    with closing(
        open_torch_dist(
            rank=0, size=1, backend="nccl", store=open_store("", None, rank=0, size=1), device=torch.device("cuda", 0)
        )
    ) as transport:
        yield transport


def test_nccl_with_itself_passes_every_check_captured_and_not():
    with alone_over_nccl() as transport:
        bench = Bench(transport=transport, device=CUDA, ops="triton", graphs=lambda: CudaGraphs(CUDA))
        findings = [look(check) for check in group_checks(bench)]
    assert [each for each in findings if each.outcome is not Outcome.OK] == []
    assert sum("captured" in each.name for each in findings) == 4


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2-lite"])
def test_every_kernel_agrees_with_torch_at_the_size_of_a_real_model(name):
    model = read_model_config(f"profiles/models/{name}.json")
    size = CaseSize(ranks=32 if name == "deepseek-v3" else 1)
    findings = map(look, kernel_checks(model, size, name=name, device=CUDA, dtype=torch.bfloat16))
    assert [each for each in findings if each.outcome is not Outcome.OK] == []


def test_a_slice_of_v3_runs_under_a_graph_whose_parts_add_up_to_its_step():
    """The host gap: what of a step is in no stage, at batch 128."""
    built = RankSlice(SliceConfig(model="profiles/models/deepseek-v3.json", layers=4, steps=10))
    assert built.captured
    times = built.measure(128)
    stages = by_stage(times.intervals)
    assert stages.pop(STAND_IN) > 0
    assert sum(each.us for each in times.intervals) == pytest.approx(times.step_us, rel=0.1)
