"""A cheap guess of the script and the language of a text, good enough to count a data set by.

Scripts come from the code points. Where a script serves many languages, frequent small words
decide; a text without enough of them stays `und`, as short prompts and code often do. Names are
those of ISO 639-1 and ISO 15924.
"""

import re
from bisect import bisect_right
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

UNDECIDED = "und"
_NO_SCRIPT = "Zyyy"
_LOOKED_AT = 2000
"""Characters from the start of a text that are looked at."""

_RANGES = (
    (0x0041, 0x005A, "Latn"),
    (0x0061, 0x007A, "Latn"),
    (0x00C0, 0x024F, "Latn"),
    (0x0370, 0x03FF, "Grek"),
    (0x0400, 0x052F, "Cyrl"),
    (0x0530, 0x058F, "Armn"),
    (0x0590, 0x05FF, "Hebr"),
    (0x0600, 0x06FF, "Arab"),
    (0x0900, 0x097F, "Deva"),
    (0x0980, 0x09FF, "Beng"),
    (0x0A00, 0x0A7F, "Guru"),
    (0x0A80, 0x0AFF, "Gujr"),
    (0x0B80, 0x0BFF, "Taml"),
    (0x0C00, 0x0C7F, "Telu"),
    (0x0C80, 0x0CFF, "Knda"),
    (0x0D00, 0x0D7F, "Mlym"),
    (0x0E00, 0x0E7F, "Thai"),
    (0x10A0, 0x10FF, "Geor"),
    (0x1100, 0x11FF, "Hang"),
    (0x1200, 0x137F, "Ethi"),
    (0x1E00, 0x1EFF, "Latn"),
    (0x3040, 0x30FF, "Kana"),
    (0x3400, 0x4DBF, "Hani"),
    (0x4E00, 0x9FFF, "Hani"),
    (0xAC00, 0xD7AF, "Hang"),
)
_STARTS = [start for start, _, _ in _RANGES]

_ONLY_LANGUAGE = {
    "Grek": "el",
    "Armn": "hy",
    "Hebr": "he",
    "Beng": "bn",
    "Guru": "pa",
    "Gujr": "gu",
    "Taml": "ta",
    "Telu": "te",
    "Knda": "kn",
    "Mlym": "ml",
    "Thai": "th",
    "Geor": "ka",
    "Hang": "ko",
    "Ethi": "am",
    "Hani": "zh",
    "Jpan": "ja",
    "Deva": "hi",
}

_SMALL_WORDS = {
    "Latn": {
        "en": "the of and to is in that for with are you what how this from write be can which it "
        "he she his her has have had was were does do if many much more than each on at by as an "
        "or not when there their they into given find my me your would should all who where will",
        "de": "der die und das ist nicht ein eine zu mit den auf für von wie was ich sie im dem",
        "fr": "le la les des et est une un que pour dans qui sur pas vous avec comment du au ce ne",
        "es": "el los las una que es por para con del como qué en se un cómo su lo más cuál la de",
        "pt": "os uma que para com não do da em um como dos das é por ao mais você são qual de",
        "it": "il che di per una non con del della sono come è gli nel un più le si cosa dei",
        "nl": "de het een van en is dat niet met voor op zijn ik wat hoe te aan er bij deze",
        "pl": "nie jest się na do że jak co to dla przez czy od po być które są oraz jaki jaka",
        "cs": "je na se že do jak pro co není jsou které od také být nebo by jaký při jaké",
        "sv": "och att det som är en på för av inte med den till vad hur jag har ett kan från",
        "da": "og at det er en på for af ikke med den til hvad hvordan jeg har et kan fra der",
        "fi": "ja ei että se hän mutta mitä miten tämä ovat oli kun joka voi myös kuin on",
        "tr": "bir ve bu için ne da de ile çok nasıl mi olarak daha gibi var değil olan en",
        "vi": "là và của có cho không một được trong người với các này những như thế nào để",
        "id": "yang dan di dengan untuk dari ini apa pada adalah tidak itu dalam bagaimana ke",
        "ro": "și de la în cu pe care este nu un pentru ce din să mai sunt cum lui",
        "hu": "az és hogy nem egy is van ez meg de ha el vagy mint hogyan kell milyen mi",
    },
    "Cyrl": {
        "ru": "и в не на что с как это по из для он я то к все так у же но мы вы его какой",
        "uk": "і в не на що з як це та для до є у він по від а але про його які бути якщо",
        "bg": "и на в да се е за от с не че са по как това ще го като до какво или той",
        "sr": "и у је да на се са за од не који као су што из по али како бити то",
    },
    "Arab": {
        "ar": "في من على إلى أن هذا ما التي عن مع كيف هو هل كان هذه الذي لا أو ذلك بين",
        "fa": "و در به از که این را با است برای یک آن چه ها می تا هم چگونه یا شود",
        "ur": "کے میں کی ہے اور سے کا کو یہ پر نے کہ ہیں ایک کیا وہ بھی تھا نہیں کر",
    },
}
_BY_WORD = {
    script: {
        word: tuple(code for code, words in languages.items() if word in words.split())
        for words in languages.values()
        for word in words.split()
    }
    for script, languages in _SMALL_WORDS.items()
}
_WHOLE = 60
"""Points of a word that one language alone has."""

_WORD = re.compile(r"[^\W\d_]+")


class Guess(NamedTuple):
    """What a text seems to be written in."""

    language: str
    script: str


def guess_language(text: str) -> Guess:
    """The script of most letters, and the language whose small words are most frequent."""
    start = text[:_LOOKED_AT]
    script = _main_script(start)
    if script in _ONLY_LANGUAGE:
        return Guess(_ONLY_LANGUAGE[script], script)
    if script in _BY_WORD:
        return Guess(_by_small_words(start, script), script)
    return Guess(UNDECIDED, script)


def _main_script(text: str) -> str:
    if text.isascii():
        return "Latn" if _WORD.search(text) else _NO_SCRIPT
    counts: Counter[str] = Counter()
    for character, count in Counter(text).items():
        counts[_script_of(character)] += count
    counts.pop(_NO_SCRIPT, None)
    if not counts:
        return _NO_SCRIPT
    # An ideograph says as much as a word, and such texts are full of Latin names.
    for dense in ("Hani", "Kana", "Hang"):
        counts[dense] *= 4
    if counts["Kana"] and counts["Kana"] * 10 >= counts["Hani"]:
        counts["Jpan"] = counts.pop("Kana") + counts.pop("Hani")
    return max(counts, key=lambda script: (counts[script], script))


@lru_cache(maxsize=1 << 16)
def _script_of(character: str) -> str:
    code = ord(character)
    place = bisect_right(_STARTS, code) - 1
    return _RANGES[place][2] if place >= 0 and code <= _RANGES[place][1] else _NO_SCRIPT


def _by_small_words(text: str, script: str) -> str:
    by_word = _BY_WORD[script]
    words = Counter(_WORD.findall(text.lower()))
    scores: Counter[str] = Counter()
    for word, count in words.items():
        languages = by_word.get(word, ())
        for language in languages:
            # A word that several languages have says less.
            scores[language] += count * (_WHOLE // len(languages))
    if not scores:
        return UNDECIDED
    best, score = max(scores.items(), key=lambda item: (item[1], item[0]))
    rivals = [other for language, other in scores.items() if language != best]
    is_clear = score > max(rivals, default=0)
    is_frequent = score >= _WHOLE and score >= words.total() * _WHOLE // 12
    return best if is_clear and is_frequent else UNDECIDED
