"""Conversations out of files, directories, object stores and Hugging Face data sets.

reader = open_source(settings, on_bad_row="skip", max_turn_chars=200_000, progress=progress)
for conversation in reader:
    ...
reader.report.rows_bad
"""

from fledge.data.sources.reader import SourceReader, open_source
from fledge.data.sources.report import BadRow, SourceReport

__all__ = ["BadRow", "SourceReader", "SourceReport", "open_source"]
