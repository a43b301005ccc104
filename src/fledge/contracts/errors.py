"""Every error a user can meet.

    FledgeError
    ├── ConfigError      a setting or argument is wrong            (exit code 2)
    ├── ArtifactError    a file or directory is missing or damaged (exit code 1)
    ├── MismatchError    two artifacts do not belong together      (exit code 1)
    ├── CapacityError    memory, disk or context is too small      (exit code 1)
    ├── FetchError       something could not be downloaded         (exit code 1)
    ├── TrainingError    training cannot go on                     (exit code 1)
    ├── MeasurementError nothing could be measured                 (exit code 1)
    ├── EngineError      another engine did not do what was asked  (exit code 1)
    └── RequestError     a prompt or request cannot be served      (exit code 2)

A message says what is wrong, names both values, and says what to do. The command line prints it
as `error: ...`; a traceback appears only with `--debug`.
"""


class FledgeError(Exception):
    """Base of all errors that are the user's to solve."""

    exit_code = 1


class ConfigError(FledgeError):
    """A setting or command-line argument has a value that cannot be used."""

    exit_code = 2


class ArtifactError(FledgeError):
    """A file or directory is missing, truncated or not what it says it is."""


class MismatchError(FledgeError):
    """Two artifacts, each fine alone, do not belong together."""


class CapacityError(FledgeError):
    """Memory, disk or context length is too small for what was asked."""


class FetchError(FledgeError):
    """A download failed: no network, no such package, or the carrier changed."""


class TrainingError(FledgeError):
    """Training cannot go on: the loss or the gradient is no number any more."""


class MeasurementError(FledgeError):
    """Measuring gave no figures, or figures that cannot be right."""


class EngineError(FledgeError):
    """An engine that others wrote did not start, or failed while it answered."""


class RequestError(FledgeError):
    """A prompt or its sampling parameters cannot be served."""

    exit_code = 2
