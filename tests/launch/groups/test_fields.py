"""Who differs in what, and what is compared."""

from dataclasses import replace
from pathlib import Path

import pytest

from launch.groups.fields import Difference, RanksDiffer, config_fields, first_difference, model_fields, version_fields
from launch.groups.group import alike
from runtime import EngineConfig, SchedulerConfig
from runtime.settings.settling import settle


def test_ranks_that_agree_do_not_differ():
    assert first_difference([(("a", "1"), ("b", "2"))] * 3) is None
    assert first_difference([()]) is None


def test_the_first_difference_is_named_with_its_values_and_ranks():
    rows = [(("torch", "2.13"), ("--seed", str(rank // 3)), ("--dtype", str(rank))) for rank in range(4)]
    difference = first_difference(rows)
    assert difference == Difference(field="--seed", values=(("0", (0, 1, 2)), ("1", (3,))))
    assert (
        str(RanksDiffer(difference))
        == "ranks differ in --seed: 0 on ranks 0-2, 1 on rank 3; it must be the same on all"
    )


def test_the_value_of_rank_0_comes_first_where_values_are_equally_common():
    rows = [(("--seed", value),) for value in ("9", "1", "1", "9")]
    difference = first_difference(rows)
    assert difference is not None
    assert difference.values == (("9", (0, 3)), ("1", (1, 2)))


@pytest.mark.parametrize("rows", [[(("--new", "1"),), ()], [(), (("--new", "1"),)]])
def test_a_field_that_some_do_not_have_differs(rows):
    assert "nothing on rank" in str(first_difference(rows))


def test_every_flag_of_the_engine_is_compared_but_the_folder_of_the_model():
    config = EngineConfig(model="/here", ranks=4)
    names = [name for name, _ in config_fields(config)]
    assert {"--ranks", "--max-num-seqs", "--block-size", "--combine"} <= set(names)
    assert len(names) == len(set(names))
    assert config_fields(replace(config, model="/there")) == config_fields(config)
    other = replace(config, scheduler=replace(SchedulerConfig(), max_num_seqs=7))
    difference = first_difference([config_fields(config), config_fields(other)])
    assert difference is not None
    assert difference.field == "--max-num-seqs"


def test_the_model_is_compared_by_what_is_in_its_folder(tiny, tmp_path):
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for file in Path(tiny).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert model_fields(copy) == model_fields(Path(tiny))
    with (copy / "config.json").open("a") as file:
        file.write("\n")
    difference = first_difference([model_fields(Path(tiny)), model_fields(copy)])
    assert difference is not None
    assert difference.field == "the model's config.json"


def test_a_missing_or_cut_file_of_weights_is_a_difference(tiny, tmp_path):
    for file in Path(tiny).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: 100 if file.suffix == ".safetensors" else None])
    assert "weight files" in str(first_difference([model_fields(Path(tiny)), model_fields(tmp_path)]))
    config_alone = Path(tiny) / "config.json"
    assert model_fields(config_alone)[0] == model_fields(Path(tiny))[0]


def test_versions_and_the_source_itself_are_compared():
    found = dict(version_fields(packages=("torch", "no-such-package")))
    assert found["the version of torch"][0].isdigit()
    assert found["the version of no-such-package"] == "nothing"
    assert len(found["the source of serried"]) == 12
    assert version_fields() == version_fields()


def test_two_checkpoints_of_one_shape_are_told_apart_by_what_is_in_them(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, middle in zip(folders, (b"x", b"y", b"x"), strict=True):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"0" * 40_000 + middle * 20_000 + b"0" * 40_000)
    a, b, c = map(model_fields, folders)
    assert a == c
    assert first_difference([a, b]).field == "the model's weights"


def test_ranks_that_would_try_other_ways_of_exchange_differ(tiny):
    """Each tries what is installed where it runs, and all ranks try together."""
    settled = settle(EngineConfig(model=tiny, ranks=2))
    bounded = replace(settled.config.exchange, exchange="bounded")
    tries = [(bounded, replace(bounded, exchange="symmetric")), ()]
    difference = first_difference([alike(replace(settled, exchange_tries=each)) for each in tries])
    assert str(difference) == (
        "ranks differ in the ways of exchange to be tried: bounded, symmetric on rank 0, "
        "none but what is set on rank 1; it must be the same on all"
    )
