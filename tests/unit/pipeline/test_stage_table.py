"""The table of stages: complete, in order, each reading what came before."""

from pathlib import Path

import pytest

from fledge.contracts.errors import ConfigError
from fledge.contracts.progress import SilentProgress
from fledge.contracts.recipe import Recipe, load_recipe, read_recipe
from fledge.contracts.run_settings import STAGES
from fledge.pipeline.head_stages import torchrun_command
from fledge.pipeline.road import Road
from fledge.pipeline.run import require_inputs
from fledge.pipeline.stage_table import STAGE_TABLE, stages_of

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.toml"))


def road_of(recipe: Recipe, out: Path) -> Road:
    return Road(
        recipe=recipe,
        recipe_path=Path("own.toml"),
        assignments=("train.seed=1",),
        out=out,
        command="fledge run own.toml",
        progress=SilentProgress(),
    )


def test_every_stage_has_an_entry_and_reads_earlier_ones(tmp_path: Path) -> None:
    assert tuple(STAGE_TABLE) == STAGES
    road = road_of(Recipe(), tmp_path)
    for stage in stages_of(road):
        for name in stage.reads(road):
            assert STAGES.index(name) < STAGES.index(stage.name)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_are_whole_roads(path: Path, tmp_path: Path) -> None:
    road = road_of(load_recipe(path), tmp_path)
    require_inputs(road, stages_of(road))
    assert road.recipe.prepare is not None


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"stages": ["prepare", "tokenize"]}, "the stage tokenize reads what regenerate makes"),
        ({"stages": ["train"]}, r"the stage train reads what tokenize makes, .*add tokenize"),
        ({"stages": ["prepare", "report"]}, "none of the stages that it is about"),
    ],
)
def test_a_road_with_a_gap_is_refused(
    table: dict[str, object], message: str, tmp_path: Path
) -> None:
    road = road_of(read_recipe({"run": table}), tmp_path)
    with pytest.raises(ConfigError, match=message):
        require_inputs(road, stages_of(road))


def test_training_by_several_processes_gets_the_same_settings(tmp_path: Path) -> None:
    stages = ["prepare", "regenerate", "tokenize", "train"]
    recipe = read_recipe({"target": "tiny", "run": {"stages": stages, "processes": 8}})
    words = torchrun_command(road_of(recipe, tmp_path))
    assert words[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    assert words[6:9] == ["-m", "fledge", "train"]
    assert words[9:13] == ["--corpus", str(tmp_path / "tokenize"), "--out", str(tmp_path / "train")]
    assert words[13:] == [
        "--target", "tiny", "--device", "auto", "--recipe", "own.toml", "--set", "train.seed=1",
    ]  # fmt: skip
