"""A target's tokenizer and chat template: the one place where text becomes token ids and back."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from fledge.contracts.conversation import Message
from fledge.contracts.errors import ArtifactError, RequestError
from fledge.models.quiet import first_line


class TargetTokenizer:
    """Text to ids and back, the target's way."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, directory: Path) -> "TargetTokenizer":
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                directory,
                local_files_only=True,
                trust_remote_code=False,  # otherwise transformers asks at the terminal
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError(
                f"no usable tokenizer in {directory}: {first_line(error)}. A target directory "
                "needs tokenizer.json (or its predecessors) and tokenizer_config.json."
            ) from error
        return cls(tokenizer)

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    @property
    def num_tokens(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Ids of a text as it stands, with the special tokens the target starts texts with."""
        ids = self._tokenizer(text)["input_ids"]
        return [int(token) for token in ids]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation, ready for the target's answer."""
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # templates are programs and raise what they like
            raise RequestError(
                f"the target's chat template refuses these messages: {first_line(error)}"
            ) from error
        # The template writes the special tokens itself: adding them again would double the BOS.
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return [int(token) for token in ids]

    def encode_prompt(self, prompt: str, *, raw: bool = False) -> list[int]:
        """Ids of a user's prompt: as a chat when the target has a template, unless `raw`."""
        if raw or not self.has_chat_template:
            return self.encode(prompt)
        return self.encode_chat([{"role": "user", "content": prompt}])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out."""
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)
