"""What a request of a load asks beside its prompt."""

import json
from dataclasses import dataclass
from typing import Any

from fledge.contracts.bench_settings import Api
from fledge.lab.load_answer import Counting
from fledge.lab.load_prompts import LoadPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What is asked beside the prompt."""

    model: str
    api: Api = "chat"
    temperature: float = 0.0
    repetition_penalty: float | None = None
    ignore_eos: bool = False
    timeout_s: float = 600.0
    counting: Counting = "usage"

    @property
    def route(self) -> str:
        return "/chat/completions" if self.api == "chat" else "/completions"

    def body(self, prompt: LoadPrompt, max_tokens: int) -> bytes:
        document: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
        }
        if self.api == "chat":
            document["messages"] = list(prompt.messages)
        else:
            document["prompt"] = prompt.text
        if self.counting == "usage":
            document["stream_options"] = {"include_usage": True}
        if self.repetition_penalty is not None:
            document["repetition_penalty"] = self.repetition_penalty
        if self.ignore_eos:
            document["ignore_eos"] = True
        return json.dumps(document).encode()
