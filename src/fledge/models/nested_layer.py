"""The layer's config inside a speculators config.json, with what was left out filled in.

speculators writes only what differs from the defaults of the layer's config class, so that those
defaults are part of the file's meaning.
"""

from typing import Any

from transformers import AutoConfig

DEFAULT_MODEL_TYPE = "llama"


def fill_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """All values of a layer; as given where no config class can be made of them."""
    given = {key: value for key, value in values.items() if value is not None}
    given.setdefault("model_type", DEFAULT_MODEL_TYPE)
    options = {"num_hidden_layers": 1} | given
    del options["model_type"]
    try:
        full: dict[str, Any] = AutoConfig.for_model(given["model_type"], **options).to_dict()
    except Exception:  # whatever is wrong is named where the value is read
        return given
    # Rotation is the one thing that the class rewrites, into its own newer words.
    kept = {key: value for key, value in given.items() if not key.startswith("rope")}
    return full | kept
