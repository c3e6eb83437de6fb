"""The World that a launcher's variables describe. The dictionaries are what the launchers really set, and no more."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.groups.launchers import expand_hosts, tasks_per_node
from launch.groups.world import World, alone, check_ranks, detect, own_world


def torchrun(rank: int, *, local_size: int = 2, nodes: int = 1, run_id: str = "9c64") -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(local_size * nodes),
        "LOCAL_RANK": str(rank % local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(rank // local_size),
        "GROUP_WORLD_SIZE": str(nodes),
        "MASTER_ADDR": "host0",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def open_mpi(rank: int, *, size: int = 4, local_rank: int | None = None, local_size: int = 4) -> dict[str, str]:
    local_rank = rank % local_size if local_rank is None else local_rank
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "OMPI_COMM_WORLD_NODE_RANK": str(local_rank),
        "PMIX_NAMESPACE": "prterun-vm-9122@1",
        "PMIX_RANK": str(rank),
    }


def hydra(rank: int, *, size: int = 4) -> dict[str, str]:
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "MPI_LOCALRANKID": str(rank),
        "MPI_LOCALNRANKS": str(size),
    }


def srun(rank: int, *, tasks: str = "2(x2)", nodes: str = "gpu[01-02]") -> dict[str, str]:
    counts = tasks_per_node(tasks)
    places = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(sum(counts)),
        "SLURM_STEP_NUM_TASKS": str(sum(counts)),
        "SLURM_LOCALID": str(places[rank][1]),
        "SLURM_NODEID": str(places[rank][0]),
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_TASKS_PER_NODE": tasks,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
    }


def test_torchrun_on_one_node_is_recognised():
    assert detect(torchrun(1)) == World(
        rank=1, size=2, local_rank=1, local_size=2, node_rank=0, num_nodes=1,
        source="torchrun", master_host="host0", master_port=29500, run_id="9c64 29500 0",
    )  # fmt: skip


def test_torchrun_on_two_nodes_is_recognised():
    world = detect(torchrun(3, nodes=2))
    assert (world.rank, world.size, world.local_rank, world.local_size) == (3, 4, 1, 2)
    assert (world.node_rank, world.num_nodes, world.master_host) == (1, 2, "host0")


def test_a_restart_by_torchrun_is_another_run():
    again = torchrun(1) | {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert detect(again).run_id != detect(torchrun(1)).run_id


def test_open_mpi_on_one_node_is_recognised():
    assert detect(open_mpi(3)) == World(
        rank=3, size=4, local_rank=3, local_size=4, node_rank=0, num_nodes=1, source="mpirun",
        master_host="127.0.0.1", run_id="prterun-vm-9122@1",
    )  # fmt: skip


@pytest.mark.parametrize(("rank", "local_rank", "node"), [(0, 0, 0), (1, 1, 0), (2, 2, 0), (3, 0, 1), (5, 2, 1)])
def test_open_mpi_that_fills_one_node_after_the_other_is_recognised(rank, local_rank, node):
    world = detect(open_mpi(rank, size=6, local_rank=local_rank, local_size=3))
    assert (world.node_rank, world.num_nodes, world.master_host) == (node, 2, "")


@pytest.mark.parametrize(("rank", "local_rank", "node"), [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1), (5, 2, 1)])
def test_open_mpi_that_goes_round_the_nodes_is_recognised(rank, local_rank, node):
    world = detect(open_mpi(rank, size=6, local_rank=local_rank, local_size=3))
    assert (world.node_rank, world.num_nodes) == (node, 2)


def test_mpiexec_of_hydra_is_recognised():
    world = detect(hydra(2))
    assert (world.rank, world.size, world.local_rank, world.local_size) == (2, 4, 2, 4)
    assert (world.node_rank, world.num_nodes, world.source, world.run_id) == (0, 1, "mpiexec", "")


def test_srun_on_two_nodes_is_recognised():
    assert detect(srun(3)) == World(
        rank=3, size=4, local_rank=1, local_size=2, node_rank=1, num_nodes=2,
        source="srun", master_host="gpu01", run_id="77.0.",
    )  # fmt: skip


def test_srun_may_place_unequal_numbers_of_ranks_on_nodes():
    worlds = [detect(srun(rank, tasks="2(x2),1", nodes="gpu[1-2],big")) for rank in range(5)]
    assert [(world.node_rank, world.local_rank, world.local_size) for world in worlds] == [
        (0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2), (2, 0, 1),
    ]  # fmt: skip


def test_slurms_own_pmi_adds_nothing_to_srun():
    assert detect(srun(3) | {"PMI_RANK": "3", "PMI_SIZE": "4"}) == detect(srun(3))


def test_nodes_are_even_where_all_have_as_many_ranks_that_follow_each_other():
    assert detect(torchrun(3, nodes=2)).even_local_size == 2
    assert detect(torchrun(1)).even_local_size == 2
    world = detect(srun(3))
    assert world.even_local_size == 2
    assert replace(world, local_rank=0).even_local_size == 2, "in any order within the node"
    assert replace(world, local_size=1).even_local_size == 1
    assert replace(world, size=5).even_local_size == 1
    assert replace(world, rank=1, node_rank=1, local_rank=0).even_local_size == 1  # dealt round the nodes


def test_without_variables_there_is_one_rank():
    world = detect({"PATH": "/bin", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"})
    assert world == alone()
    assert (world.rank, world.size, world.is_primary) == (0, 1, True)


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290"])
def test_a_batch_script_is_alone_and_reminded_of_srun(step):
    environ = srun(0)
    del environ["SLURM_STEP_ID"]
    world = detect(environ | ({"SLURM_STEP_ID": step} if step else {}))
    assert world.size == 1
    assert "srun would start them all" in world.describe()


def test_torchrun_started_by_srun_once_a_node_is_believed():
    environ = srun(1, tasks="1(x2)") | torchrun(3, nodes=2)
    assert detect(environ) == detect(torchrun(3, nodes=2))


def test_mpirun_inside_a_slurm_step_is_believed():
    assert detect(srun(0, tasks="1", nodes="gpu01") | open_mpi(3)) == detect(open_mpi(3))


@pytest.mark.parametrize("launcher", [torchrun, open_mpi, hydra, srun])
def test_the_ranks_of_a_group_find_different_places_in_one_group(launcher):
    worlds = [detect(launcher(rank)) for rank in range(detect(launcher(0)).size)]
    assert [world.rank for world in worlds] == list(range(worlds[0].size))
    assert len({(world.node_rank, world.local_rank) for world in worlds}) == worlds[0].size
    assert len({(world.size, world.num_nodes, world.source, world.master_host, world.run_id) for world in worlds}) == 1
    assert [world.is_primary for world in worlds] == [True] + [False] * (worlds[0].size - 1)


PARTS = {
    torchrun: ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    open_mpi: tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    hydra: ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


@pytest.mark.parametrize(
    ("launcher", "missing"), [(launcher, name) for launcher, names in PARTS.items() for name in names]
)
def test_half_of_a_launchers_variables_are_refused_with_both_ways_out(launcher, missing):
    environ = launcher(1)
    del environ[missing]
    with pytest.raises(ValueError, match=rf"without {missing}: .* sets them all; start with .*, or unset ") as refusal:
        detect(environ)
    assert all(name in str(refusal.value) for name in PARTS[launcher])


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"])
def test_half_of_slurms_variables_are_refused(missing):
    environ = srun(1)
    del environ[missing]
    with pytest.raises(ValueError, match=f"without {missing}: srun sets them all"):
        detect(environ)


def test_an_older_slurm_with_fewer_variables_is_understood():
    environ = {name: value for name, value in srun(3).items() if "STEP" not in name or name == "SLURM_STEP_ID"}
    assert detect(environ) == detect(srun(3))


@pytest.mark.parametrize(
    ("inner", "outer", "words"),
    [
        (torchrun(1), open_mpi(3), "torchrun and mpirun contradict each other: RANK = 1, but OMPI_COMM_WORLD_RANK = 3"),
        (torchrun(1), hydra(1, size=8), "WORLD_SIZE = 2, but PMI_SIZE = 8"),
        (open_mpi(3), hydra(0, size=1), "mpirun and mpiexec contradict each other: OMPI_COMM_WORLD_RANK = 3, but PMI"),
        (torchrun(0, local_size=1, run_id=""), srun(3), "RANK = 0, but SLURM_PROCID = 3"),
    ],
)
def test_two_launchers_that_contradict_each_other_are_refused(inner, outer, words):
    with pytest.raises(ValueError, match=words) as refusal:
        detect(inner | outer)
    assert str(refusal.value).count("unset ") == 2


def test_two_launchers_that_agree_are_fine():
    exported = torchrun(3, local_size=4, run_id="")
    assert detect(exported | open_mpi(3)) == detect(exported)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"RANK": "2"}, "RANK = 2, with WORLD_SIZE = 2: ranks count from 0"),
        ({"RANK": "-1"}, "RANK = -1"),
        ({"RANK": "one"}, "RANK = 'one' is no whole number; unset RANK"),
        ({"RANK": ""}, "RANK = '' is no whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE = 0: there is at least one rank"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK = 2, with LOCAL_WORLD_SIZE = 2"),
        ({"LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE = 4, with WORLD_SIZE = 2"),
        ({"GROUP_WORLD_SIZE": "2"}, "2 node.s., but LOCAL_WORLD_SIZE = 2 and WORLD_SIZE = 2"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT = 'http' is no whole number"),
    ],
)
def test_numbers_that_cannot_be_are_refused(changed, words):
    with pytest.raises(ValueError, match=words):
        detect(torchrun(1) | changed)


def test_slurm_lists_of_different_length_are_refused():
    with pytest.raises(ValueError, match=r"SLURM_STEP_TASKS_PER_NODE = '2\(x2\)' \(2 nodes\).* \(3 nodes\)"):
        detect(srun(1, nodes="gpu[01-03]"))


def test_what_was_found_is_one_line():
    assert detect(torchrun(3, nodes=2)).describe() == "torchrun: rank 3 of 4, local rank 1 of 2, node 1 of 2"
    assert alone().describe() == "no launcher: one rank"
    assert own_world(1, 4).describe() == "own launcher: rank 1 of 4, local rank 1 of 4, node 0 of 1"


def test_ranks_on_the_command_line_must_be_what_the_launcher_started():
    check_ranks(detect(torchrun(1)), None)
    check_ranks(detect(torchrun(1)), 2)
    check_ranks(alone(), 4)
    with pytest.raises(ValueError, match="--ranks is 4, but torchrun started 2; leave --ranks out, or start 4 ranks"):
        check_ranks(detect(torchrun(1)), 4)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login1", ["login1"]),
        ("gpu[01-03,07],login1", ["gpu01", "gpu02", "gpu03", "gpu07", "login1"]),
        ("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]),
        ("a-[9-11]-ib.x,b", ["a-9-ib.x", "a-10-ib.x", "a-11-ib.x", "b"]),
    ],
)
def test_lists_of_nodes_are_expanded(text, hosts):
    assert expand_hosts(text) == hosts


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=8), st.integers(1, 6))
def test_numbers_of_nodes_keep_their_zeros(numbers, width):
    names = [str(number).zfill(width) for number in numbers]
    assert expand_hosts(f"n[{','.join(names)}]") == [f"n{name}" for name in names]


@pytest.mark.parametrize("text", ["", "gpu[1-", "gpu[a-b]", "gpu[1-99999999]", "gpu]1[", "a b", "n[0-999][0-999]"])
def test_what_is_no_list_of_nodes_is_refused(text):
    with pytest.raises(ValueError, match="nodes"):
        expand_hosts(text)


def test_tasks_per_node_are_expanded():
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("8") == [8]
    for text in ("", "2(x)", "x", "2(x999999999)"):
        with pytest.raises(ValueError, match="tasks per node"):
            tasks_per_node(text)


def test_whatever_the_variables_say_the_answer_is_a_world_or_words():
    sets = (torchrun(1), open_mpi(1), hydra(1), srun(1))
    for picked in itertools.product((0, 1, 2), repeat=len(sets)):
        environ = {}
        for environment, how in zip(sets, picked, strict=True):
            environ |= dict(list(environment.items())[: len(environment) * how // 2])
        said = "unset"
        try:
            detect(environ)
        except ValueError as refusal:
            said = str(refusal)
        assert "unset" in said
