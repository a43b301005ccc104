"""Files and batches as they are remembered, and as OpenAI's API shows them."""

import secrets
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")

Ending = Literal["completed", "expired", "cancelled"]
Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
OVER = frozenset(("failed", *get_args(Ending)))


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(16)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file that somebody handed in, or that a batch left."""

    id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int

    @property
    def public(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Usage:
    """Tokens of the answers so far."""

    num_prompt: int = 0
    num_cached: int = 0
    num_answer: int = 0

    def add(self, usage: dict[str, Any]) -> None:
        """What one response says it used."""
        self.num_prompt += usage["prompt_tokens"]
        self.num_answer += usage["completion_tokens"]
        self.num_cached += usage["prompt_tokens_details"]["cached_tokens"]

    @property
    def public(self) -> dict[str, Any]:
        return {
            "input_tokens": self.num_prompt,
            "input_tokens_details": {"cached_tokens": self.num_cached},
            "output_tokens": self.num_answer,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.num_prompt + self.num_answer,
        }


@dataclass(slots=True, kw_only=True)
class BatchRecord:
    """One batch from its creation on; what is counted while it runs is in `counts` and `usage`."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_name: str
    """Ids of its results from the beginning: where finished lines are written."""

    error_name: str
    keep_results_s: int
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    ending: Ending | None = None
    """What it will be when the results are written."""

    moments: dict[str, int] = field(default_factory=dict)
    """When it got to a status."""

    errors: list[dict[str, Any]] = field(default_factory=list)
    num_total: int = 0
    num_completed: int = 0
    num_failed: int = 0
    usage: Usage = field(default_factory=Usage)
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def is_over(self) -> bool:
        return self.status in OVER

    def reach(self, status: Status, now: float) -> None:
        self.status = status
        self.moments.setdefault(status, int(now))

    @property
    def public(self) -> dict[str, Any]:
        errors = {"object": "list", "data": self.errors} if self.errors else None
        moments = {
            f"{status}_at": self.moments.get(status)
            for status in get_args(Status)
            if status != "validating"
        }
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **moments,
            "request_counts": {
                "total": self.num_total,
                "completed": self.num_completed,
                "failed": self.num_failed,
            },
            "usage": self.usage.public,
            "metadata": self.metadata,
        }

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, document: dict[str, Any]) -> "BatchRecord":
        return cls(**{**document, "usage": Usage(**document["usage"])})
