"""One rank of a group that meets and then does one deed. Without torch: the rooms are bare packages here.

    ranks.py '{"ranks": 4}' DEED        started by a person, by serried's own launcher, or by another launcher

Rank 0 prints a line of JSON: what each rank found. If it started the others, it prints another: who did not end well.
"""

import json
import os
import signal
import sys
import types
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent.parent
sys.path.insert(0, str(ROOT))
for room in ("ep", "runtime"):
    package = sys.modules[room] = types.ModuleType(room)
    package.__path__ = [str(ROOT / room)]

from launch.groups.as_rank import hush, take_child  # noqa: E402
from launch.groups.rendezvous import RendezvousConfig, meet, open_gate  # noqa: E402
from launch.groups.spawn import start_ranks  # noqa: E402
from launch.groups.world import detect, own_world  # noqa: E402

LIMIT_S = 60.0


def main() -> None:
    child, words = take_child(sys.argv[1:])
    flags, deed = json.loads(words[0]), words[1]
    num_ranks = flags.pop("ranks", 1)
    fields = tuple(flags.pop("fields", {"--seed": "0"}).items())
    config = RendezvousConfig(
        **{name: Path(value) if name == "key_file" else value for name, value in flags.items()}, start_timeout=LIMIT_S
    )
    world = child.world if child is not None else detect(os.environ)
    starts_others = child is None and world.size == 1 and num_ranks > 1
    if starts_others:
        world = own_world(0, num_ranks)
    if not world.is_primary:
        hush(world.rank)
    with ExitStack() as stack:
        gate, ranks = None, None
        if starts_others:
            gate = stack.enter_context(open_gate(world, config, by_file=False))
            command = [sys.executable, "-P", __file__]
            ranks = start_ranks(words, size=num_ranks, invitation=gate.invitation, command=command)
            stack.enter_context(ranks)
        if deed == "exit-early" and world.rank == 2:
            sys.exit(3)
        meeting = meet(
            world, config, fields=fields, endpoints=("control", "store"), gate=gate,
            invitation=child.invitation if child is not None else None, check=ranks.check if ranks else None,
        )  # fmt: skip
        stack.enter_context(meeting)
        if deed == "outlive" and child is not None:
            child.trust_pulse()
        told = {"pid": os.getpid(), "says": world.describe(), "key": meeting.key.hex(), "endpoints": meeting.addresses}
        told |= {"torch": "torch" in sys.modules, "threads": os.environ.get("OMP_NUM_THREADS")}
        everybody = [json.loads(word) for word in meeting.gather(json.dumps(told), timeout_s=LIMIT_S)]
        if world.is_primary:
            say(json.dumps(everybody))
        sys.stderr.write(f"{deed} on {world.rank}\n")
        act(deed, world.rank)
        if ranks is not None:
            say(json.dumps(ranks.wait(grace_s=1.0)))


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def act(deed: str, rank: int) -> None:
    if deed in ("wait", "outlive") and rank == 0:
        sys.stdin.read()
    elif deed in ("wait", "outlive", f"wait-on-{rank}"):
        signal.pause()
    elif deed == "raise" and rank == 0:
        raise RuntimeError("planted")
    elif deed == f"fail-on-{rank}":
        sys.exit(7)


if __name__ == "__main__":
    main()
