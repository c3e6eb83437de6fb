"""One engine in a process of its own: it loads a checkpoint, says that it is ready, and runs batches that it is told.

    python engines.py NAME FOLDER [THREADS]       NAME: serried, serried_ranks, vllm or transformers

Each line on standard input is a number of requests; the answer, on a line of its own that begins with MARK, is JSON:
wall seconds of the batch, CPU seconds of this process, and the tokens that came out. All engines get the same prompts.
Imports what it measures only when it is asked for it, so that each runs with the packages of its own environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

MARK = "@@"
INPUT_LEN, OUTPUT_LEN = 32, 64
VOCABULARY = 2048
MOST_REQUESTS = 64
MAX_LEN = 256
NUM_BLOCKS = MOST_REQUESTS * 4
OPEN = ExitStack()
"""What lives until this process ends."""

Run = Callable[[list[list[int]]], int]
"""Decode these prompts together; returns the number of tokens that came out."""


def prompts(num_requests: int) -> list[list[int]]:
    """Prompts that share no prefix, so that no cache of prefixes helps anyone."""
    return [
        [2 + (request * 977 + position * 131 + request * position) % (VOCABULARY - 2) for position in range(INPUT_LEN)]
        for request in range(num_requests)
    ]


def serried(folder: str, threads: int) -> Run:
    """One rank with so many threads."""
    config = _config(folder, cpu_threads=threads)
    return _decodes(import_module("runtime").Engine(config))


def serried_ranks(folder: str, threads: int) -> Run:
    """So many ranks, processes of one thread, which divide requests and experts. CPU seconds are rank 0's alone."""
    config = _config(folder, ranks=threads)
    group, place = import_module("launch.groups.group"), import_module("launch.groups.place")
    words = ["generate", folder, "--ranks", str(threads), "--num-blocks", str(NUM_BLOCKS), "--ops", config.ops]
    telling = group.Telling(say=lambda _: None, on_plan=lambda _: None, on_progress=lambda *_: None)
    # Not closed: the other ranks end with this process.
    return _decodes(OPEN.enter_context(group.engine_of(config, place.GroupFlags(), group.Start(words=words), telling)))


def _config(folder: str, **settings: int) -> Any:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    runtime = import_module("runtime")
    cache = runtime.CacheConfig(num_blocks=NUM_BLOCKS)
    return runtime.EngineConfig(model=folder, ops=os.environ.get("OPS", "auto"), cache=cache, **settings)


def _decodes(engine: Any) -> Run:
    params = import_module("runtime").SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)

    def run(batch: list[list[int]]) -> int:
        return sum(len(output.token_ids) for output in engine.generate(batch, params))

    return run


def vllm(folder: str, threads: int) -> Run:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # Not bound to cores: a bound thread that waits by spinning is at the mercy of whoever else is on its core.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    package = import_module("vllm")
    llm = package.LLM(
        model=folder,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=MAX_LEN,
        max_num_seqs=MOST_REQUESTS,
        enable_prefix_caching=False,
    )
    params = package.SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True, detokenize=False)

    def run(batch: list[list[int]]) -> int:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in batch], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return run


def transformers(folder: str, threads: int) -> Run:
    import torch

    torch.set_num_threads(threads)
    package = import_module("transformers")
    model = package.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def run(batch: list[list[int]]) -> int:
        ids = torch.tensor(batch)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=OUTPUT_LEN,
                min_new_tokens=OUTPUT_LEN,
                do_sample=False,
                pad_token_id=0,
            )
        return int(out.shape[0] * (out.shape[1] - ids.shape[1]))

    return run


ENGINES: dict[str, Callable[[str, int], Run]] = {
    "serried": serried,
    "serried_ranks": serried_ranks,
    "vllm": vllm,
    "transformers": transformers,
}


def main(name: str, folder: str, threads: int) -> None:
    run = ENGINES[name](folder, threads)
    run(prompts(1))
    _say({"ready": name})
    for line in sys.stdin:
        batch = prompts(int(line))
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = run(batch)
        _say({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "tokens": tokens})


def _say(answer: dict[str, object]) -> None:
    sys.stdout.write(f"{MARK}{json.dumps(answer)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 2)
