"""The road from a recipe to a head that others can serve: one entry for each stage, in order."""

from fledge.contracts.run_settings import StageName
from fledge.pipeline import data_stages, export_stage, head_stages, lab_stages
from fledge.pipeline.road import Road, Stage

STAGE_TABLE: dict[StageName, Stage] = {
    stage.name: stage
    for stage in (
        Stage(
            name="prepare",
            reads=lambda road: (),
            make=data_stages.make_conversations,
            forecast=data_stages.forecast_conversations,
        ),
        Stage(
            name="regenerate",
            reads=lambda road: ("prepare",),
            make=data_stages.make_answers,
            forecast=data_stages.forecast_answers,
        ),
        Stage(
            name="tokenize",
            reads=data_stages.source_of_corpus,
            make=data_stages.make_corpus,
            forecast=data_stages.forecast_corpus,
        ),
        Stage(
            name="capture",
            reads=lambda road: ("tokenize",),
            make=head_stages.make_features,
            forecast=head_stages.forecast_features,
        ),
        Stage(
            name="train",
            reads=head_stages.source_of_training,
            make=head_stages.make_head,
            forecast=head_stages.forecast_head,
        ),
        Stage(
            name="select",
            reads=lambda road: ("train",),
            make=lab_stages.make_scorecard,
            forecast=lab_stages.forecast_scorecard,
        ),
        Stage(
            name="tune",
            reads=lab_stages.source_of_head,
            make=lab_stages.make_tuning,
            forecast=lab_stages.forecast_tuning,
        ),
        Stage(
            name="bench",
            reads=lab_stages.source_of_drafting,
            make=lab_stages.make_bench,
            forecast=lab_stages.forecast_bench,
        ),
        Stage(
            name="export",
            reads=lab_stages.source_of_drafting,
            make=export_stage.make_exports,
            forecast=export_stage.forecast_exports,
        ),
        Stage(
            name="report",
            reads=lab_stages.reported_stages,
            make=lab_stages.make_page,
            forecast=lab_stages.forecast_page,
        ),
    )
}


def stages_of(road: Road) -> list[Stage]:
    """Those that the recipe asks for, in order."""
    return [STAGE_TABLE[name] for name in road.stages]
