"""Numbers that stand for conversations, by which some are held out."""

from xxhash import xxh3_64_intdigest

from fledge.contracts.conversation import asked_id


def conversation_hash(row_id: str) -> int:
    """The same for all answers to one prompt and to its variants: none may be trained on if another
    is measured on."""
    return xxh3_64_intdigest(asked_id(row_id).encode())
