"""Places in a text where it becomes personal: introductions, relatives, letters, homes.

Two uses. Patterns ending in `$` are matched against what stands before a tag and are evidence for
it. `find_introduced` tags by itself what follows the surest phrases, also in languages that a
tagger of names does not know.
"""

import re
from collections.abc import Iterator
from typing import Literal

_CAPITAL = "A-Z\u00c0-\u00d6\u00d8-\u00de\u0100-\u024f"
_WORD = rf"[{_CAPITAL}][\w'’-]{{1,30}}"
_PARTICLES = (
    r"(?:(?:de|da|do|dos|das|di|van|von|der|den|del|della|la|le|el|al|bin|ibn|ter|ten) ){0,2}"
)
_NAME = rf"{_WORD}(?: {_PARTICLES}{_WORD}){{0,3}}"
_TITLE = (
    r"(?:(?:Mr|Mrs|Ms|Miss|Mx|Dr|Prof|Herrn?|Frau|Monsieur|Madame|Mme|Señora?|Sra?|Signora?"
    r"|Senhora?|Dott)\.? ){0,2}"
)
TITLE = re.compile(_TITLE)

_SAID = (
    r"my (?:full |first )?name is|my name's|ich hei(?:ß|ss)e|mein name ist|je m['’]appelle"
    r"|mon nom est|me llamo|mi nombre es|me chamo|chamo-me|meu nome é|mi chiamo|il mio nome è"
    r"|jag heter|mitt namn är|ik heet|mijn naam is|nazywam się|mam na imię|jmenuji se"
)
_MINE = (
    r"(?:my|our) (?:late |older |younger |elder |little |best |dear |new |old |ex-?)?"
    r"(?:husband|wife|partner|son|daughter|brother|sister|mother|father|mom|mum|dad|aunt|uncle"
    r"|cousin|nephew|niece|grandmother|grandfather|grandson|granddaughter|boyfriend|girlfriend"
    r"|fiancée?|friend|colleague|co-?worker|boss|manager|neighbou?r|landlord|landlady|tenant"
    r"|room-?mate|flat-?mate|therapist|dentist|lawyer|nanny|ex)"
    r"|(?:mein|unser)(?:e[mnr]?)? (?:mann|frau|sohn|tochter|bruder|schwester|mutter|vater|freundin"
    r"|freund|chefin|chef|kollegin|kollege|nachbarin|nachbar|partnerin|partner|tante|onkel"
    r"|vermieterin|vermieter)"
    r"|(?:mon|ma|notre) (?:mari|femme|fils|fille|frère|sœur|soeur|mère|père|amie|ami|copine|copain"
    r"|patronne|patron|collègue|voisine|voisin|oncle|tante|cousine|cousin|épouse|époux)"
    r"|(?:mi|nuestr[oa]) (?:marido|esposo|esposa|mujer|hijo|hija|hermano|hermana|madre|padre|amigo"
    r"|amiga|novio|novia|jefe|jefa|colega|vecino|vecina|tío|tía|primo|prima|abuelo|abuela)"
    r"|(?:meu|minha|noss[oa]) (?:marido|esposa|mulher|filho|filha|irmão|irmã|mãe|pai|amigo|amiga"
    r"|namorado|namorada|chefe|colega|vizinho|vizinha|tio|tia|primo|prima|avô|avó)"
    r"|(?:mi[oa]|nostr[oa]) (?:marito|moglie|figlio|figlia|fratello|sorella|madre|padre|amico"
    r"|amica|fidanzato|fidanzata|capo|collega|vicino|vicina|zio|zia|cugino|cugina|nonno|nonna)"
)
_DEAR = (
    r"dear|hi|hello|hey|sehr geehrter?|lieber?|hallo|chère|cher|estimad[oa]|querid[oa]|car[oa]"
    r"|gentile|prezad[oa]|beste|geachte"
)
_REGARDS = (
    r"(?:(?:kind|best|warm|warmest|with best|many) )?regards|(?:yours )?sincerely|yours truly"
    r"|yours faithfully|best wishes|all the best|best|cheers|many thanks|thanks|thank you|love"
    r"|mit freundlichen grüßen|viele grüße|beste grüße|liebe grüße|(?:bien )?cordialement"
    r"|saludos(?: cordiales)?|atentamente|atenciosamente|cordiali saluti|met vriendelijke groet"
)
_ROLE = (
    r"(?:full |first |last |patient |customer |employee |student |contact |account )?name|patient"
    r"|customer|client|tenant|landlord|employee|applicant|recipient|candidate|insured|beneficiary"
    r"|policy ?holder|card ?holder|account ?holder|attn|contact|bill to|ship to|deliver to"
    r"|prepared for|signed(?: by)?|nom|nombre|nome|vorname|nachname|kunde|patientin|mieter(?:in)?"
    r"|empfänger|paciente|cliente"
)
NAME_BEFORE = re.compile(
    rf"(?i:(?:\b(?:{_SAID})|\b(?:{_MINE}),?|(?:^|\n)\s*(?:{_DEAR})|\b(?:{_ROLE})\s*[:=,]"
    rf"|(?:^|\n)\s*(?:{_REGARDS})[,.!]?\s*\n)\s*{_TITLE}$)"
    r"|\b(?i:ship|send|deliver|mail|forward)(?: (?:it|them|this|that))? to $|\bcontact $"
)
WEAK_NAME_BEFORE = re.compile(
    r"(?i:\b(?:i am|i['’]m|ich bin|je suis|soy|sou|sono|jag är|ik ben) $)"
)

_WE = r"(?:i|we|i['’]m|we['’]re|i am|we are|i['’]ve|we['’]ve)"
_LIVE = (
    r"(?:live|lived|living|moved|moving|reside|grew up|was born|were born|born|based|staying"
    r"|settled|come|came|hail|from)"
)
_HOME_ELSEWHERE = (
    r"\b(?i:(?:wohne|lebe|wohnen|leben|komme|kommen|stamme)(?: jetzt| aktuell)? (?:in|aus|bei) "
    r"|(?:j['’]habite|nous habitons|je vis|nous vivons|je viens)(?: à| en| de| dans| au)? "
    r"|(?:vivo|vivimos|resido|nací) en |(?:soy|somos|vengo) de "
    r"|(?:moro|moramos|vivo|vivemos|nasci) (?:em|no|na) |(?:sou|venho) de "
    r"|(?:abito|abitiamo|vivo|viviamo) (?:a|in) |vengo da )"
)
HOME_BEFORE = re.compile(
    rf"(?i:\b{_WE}(?: (?:just|now|currently|recently|both|all|still|have|had|also|originally))*"
    rf" {_LIVE}(?: (?:here|over|back|down|up))? ?(?:in|to|at|near|from|outside|on)? ?"
    r"|\bmy (?:home ?town|home|address|house|flat|apartment)(?: is|:)?(?: in| at)? "
    r"|\b(?:home|shipping|billing|postal|mailing) address(?: is)?:? "
    rf"|{_HOME_ELSEWHERE})$"
    r"|\b(?i:ship|send|deliver|mail)(?: (?:it|them|this|that))? to $"
)
MOVED_ON = re.compile(
    r"(?i:^ (?:and|but|then|before|und|et|y|e) (?:\w+ ){0,2}(?:moved|moving) to $)"
)
"""Between a home and the next: "grew up in Tulsa and moved to Boise"."""

FROM = re.compile(r"(?i:^[^.!?\n]{0,40}\b(?:from|aus|de|da|din|из) $)")
"""Between a name that counted and a place: ", a nurse from "."""

_ENGLISH = re.compile(
    r"\b(?:the|and|is|are|to|of|my|your|for|with|please|at|on|has|was|you|from|this|our|i)\b"
)
_NOT_ENGLISH = re.compile(
    r"\b(?:der|die|das|und|ist|ich|sie|mir|mein|meine|le|la|les|est|et|je|mon|ma|el|los|y|es|mi"
    r"|su|que|il|che|è|di|o|os|um|uma|é|meu|minha|em|het|een|mijn|en|är|jag|och|w|się|to jest)\b"
    r"|[^\x00-\u024f\u2000-\u206f]"
)

_HAN = "\u4e00-\u9fff"
_KANA = "\u3040-\u30ff"
_INTRODUCED: tuple[tuple[Literal["name", "place"], re.Pattern[str]], ...] = (
    ("place", re.compile(rf"{_HOME_ELSEWHERE}({_NAME})")),
    ("name", re.compile(rf"\b(?i:{_SAID}) {_TITLE}({_NAME})")),
    ("name", re.compile(rf"\b(?i:{_MINE}),? {_TITLE}({_NAME})")),
    ("name", re.compile(rf"(?:^|\n)[ \t]*(?i:{_DEAR}) {_TITLE}({_NAME})(?=[ \t]*[,\n])")),
    (
        "name",
        re.compile(rf"(?:^|\n)[ \t]*(?i:{_REGARDS}|signed)[,.!]?\s{{1,3}}({_NAME})[ \t]*(?=\n|$)"),
    ),
    (
        "name",
        re.compile(rf"(?:我叫|我的名字是|我的名字叫|我名叫)([{_HAN}]{{2,4}})(?=[,.!。！，\s]|$)"),
    ),
    ("name", re.compile(rf"私の名前は([{_HAN}{_KANA}]{{2,10}}?)(?:です|と申します)")),
    ("name", re.compile(r"मेरा नाम ([\u0900-\u097f]+(?: [\u0900-\u097f]+)?) (?=है|हैं)")),
    ("name", re.compile(r"(?i:меня зовут|мо[её] имя) ([А-ЯЁ][а-яё]+(?: [А-ЯЁ][а-яё]+){0,2})")),
    ("name", re.compile(r"제 이름은 ([가-힣]{2,4}?)(?=입니다|이에요|예요|이고)")),
    (
        "place",
        re.compile(
            rf"(?:我住在|我家在|我来自|，住在|,住在|，来自|,来自)([{_HAN}]{{2,6}})(?=[,.!。！，\s]|$)"
        ),
    ),
    ("place", re.compile(r"(?i:\b(?:я из|живу в|жив[её]м в)) ([А-ЯЁ][а-яё-]+)")),
)
_STREETS = (
    re.compile(
        rf"\b[0-9]{{1,5}}[A-Za-z]? (?:{_WORD} ){{1,3}}"
        r"(?:Street|St|Avenue|Ave|Road|Rd|Lane|Ln|Drive|Court|Ct|Boulevard|Blvd|Way|Terrace|Close"
        r"|Crescent|Square|Highway|Parkway)\b"
    ),
    re.compile(
        rf"\b[{_CAPITAL}][\w-]{{1,30}}(?:straße|strasse|str\.|weg|platz|allee|gasse)"
        r" [0-9]{1,4}[a-z]?\b"
    ),
    re.compile(
        r"\b[0-9]{1,4}(?: bis| ter)?,? (?:rue|avenue|boulevard|place|chemin|impasse|allée|quai)"
        rf" (?:de |du |des |la |le |d['’]|l['’]){{0,3}}{_WORD}(?: {_WORD}){{0,2}}"
    ),
    re.compile(
        r"\b(?:Calle|Avenida|Plaza|Paseo|Via|Viale|Piazza|Corso|Rua|Travessa)"
        rf" (?:de |del |do |da |della |la |los ){{0,2}}{_WORD}(?: {_WORD}){{0,2}},? [0-9]{{1,4}}\b"
    ),
)
_ADDRESSEE = re.compile(
    rf"\b(?i:contact|call|e-?mail|text|ask|reach) ({_WORD}(?: {_PARTICLES}{_WORD}){{1,3}})"
    r"(?= (?:at|on|via|under|by)\b| ?[(<])"
)
_PERSONAL = re.compile(
    rf"(?i:\b(?:{_SAID}|{_MINE}|{_REGARDS}|i am|i['’]m|ich bin|je suis|soy|sou|sono"
    rf"|(?:{_ROLE})(?=\s*[:=,])|(?:ship|send|deliver|mail|forward)(?: (?:it|them|this|that))? to"
    rf"|{_WE} (?:\w+ ){{0,2}}{_LIVE}|my (?:home|address|house|flat)|address"
    rf")\b|(?:^|\n)\s*(?:{_DEAR})\b)|{_HOME_ELSEWHERE}"
    r"|我叫|我的名字|我名叫|住在|来自|私の名前|मेरा नाम|(?i:меня зовут|я из|живу)|제 이름"
)


def has_personal_words(text: str) -> bool:
    """Whether any phrase of this module may be in the text."""
    return _PERSONAL.search(text) is not None


def looks_english(text: str) -> bool:
    """More of the small words of English than of other languages."""
    lowered = text.lower()
    return len(_ENGLISH.findall(lowered)) > len(_NOT_ENGLISH.findall(lowered))


def find_introduced(text: str) -> Iterator[tuple[Literal["name", "place"], int, int]]:
    """What follows a phrase that nothing but a name or a home follows."""
    for kind, pattern in _INTRODUCED:
        for match in pattern.finditer(text):
            yield kind, *match.span(1)


def find_addressees(text: str) -> Iterator[tuple[int, int]]:
    """Whom to contact, if contact data follows."""
    for match in _ADDRESSEE.finditer(text):
        yield match.span(1)


def find_streets(text: str) -> Iterator[tuple[int, int]]:
    """Street and house number, whoever lives there."""
    for pattern in _STREETS:
        for match in pattern.finditer(text):
            yield match.span()
