"""The target answers conversations again: by URL, by the Batch API, or in this process.

    dialogue   what to ask about one conversation, and what became of it
    journal    answers on disk as they come: append-only, whole lines only
    worklist   which rows are open, done or failed; hands out dialogues, takes replies
    ...        three ways to get replies, each an `Answerer`
    stage      settings and a directory of conversations in, a directory of answers out

Nothing here needs torch except `in_process`, which only the in-process way imports.
"""
