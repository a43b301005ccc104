"""Numbers that stand for conversations, by which some are held out."""

from xxhash import xxh3_64_intdigest

from fledge.contracts.conversation import split_copy_id


def conversation_hash(row_id: str) -> int:
    """The same for all answers to one prompt: none may be trained on if another is measured on."""
    return xxh3_64_intdigest(split_copy_id(row_id)[0].encode())
