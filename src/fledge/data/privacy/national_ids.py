"""National ids made of digits: the number's own check, and a format or words that only it has.

One check digit lets every tenth random number pass, so most need words beside them ("PESEL"). Those
with a date and two check digits, or a format of their own, are accepted alone. The US social
security number has no check digit: its area rules and the format 3-2-4 have to do.
"""

from collections.abc import Callable
from typing import Any

from stdnum.ar import cuit
from stdnum.at import vnr
from stdnum.au import tfn
from stdnum.be import nn
from stdnum.bg import egn
from stdnum.br import cpf
from stdnum.ca import sin
from stdnum.ch import ssn as ahv
from stdnum.cl import rut
from stdnum.cn import ric
from stdnum.cz import rc
from stdnum.de import idnr, stnr
from stdnum.dk import cpr
from stdnum.do import cedula
from stdnum.ee import ik
from stdnum.fr import nir
from stdnum.gb import nhs
from stdnum.gr import amka
from stdnum.hr import oib
from stdnum.id import nik
from stdnum.il import idnr as zehut
from stdnum.in_ import aadhaar
from stdnum.jp import in_ as my_number
from stdnum.kr import rrn
from stdnum.my import nric
from stdnum.nl import bsn
from stdnum.no import fodselsnummer
from stdnum.pk import cnic
from stdnum.pl import pesel
from stdnum.pt import nif
from stdnum.ro import cnp
from stdnum.ru import inn
from stdnum.se import personnummer
from stdnum.th import pin
from stdnum.tr import tckimlik
from stdnum.us import itin, ssn
from stdnum.za import idnr as za_idnr

from fledge.data.privacy.number_rule import NumberRule, same_separator
from fledge.data.privacy.number_runs import Window
from fledge.data.privacy.words import Words

_ANY_COUNTRY = (
    "national id|identity number|identity card|id card|personal id|citizen|tax id|social security|"
    "personalausweis|ausweis|carte d'identité|documento de identidad|documento d'identità|"
    "national insurance|身份证|身分證"
)


def _valid(module: Any) -> Callable[[Window], bool]:
    return lambda window: bool(module.is_valid(window.digits))


def _is_nir(window: Window) -> bool:
    month = int(window.digits[3:5])
    is_month = 1 <= month <= 12 or 20 <= month <= 42
    return window.digits[0] in "123478" and is_month and bool(nir.is_valid(window.digits))


def _is_personal_cuit(window: Window) -> bool:
    return window.digits[:2] in ("20", "23", "24", "27") and bool(cuit.is_valid(window.digits))


def _is_ahv(window: Window) -> bool:
    return window.digits.startswith("756") and bool(ahv.is_valid(window.digits))


def _is_ssn(window: Window) -> bool:
    return bool(ssn.is_valid(window.digits) or itin.is_valid(window.digits))


# Formats that are evidence enough, given the number's check.
_BY_FORMAT: tuple[tuple[str, Callable[[Window], bool], tuple[str, ...], float], ...] = (
    ("us_ssn", _is_ssn, ("3-2-4",), 0.8),
    ("br_cpf", _valid(cpf), ("3.3.3-2",), 0.95),
    ("fr_nir", _is_nir, (*same_separator("1_2_2_2_3_3_2", " ."), "15", "13 2"), 0.95),
    ("cn_ric", _valid(ric), ("18", "6 8 4", "6-8-4"), 0.95),
    ("no_fodselsnummer", _valid(fodselsnummer), ("11", "6 5"), 0.85),
    ("be_nn", _valid(nn), ("2.2.2-3.2", "2.2.2-3-2", "2 2 2 3 2", "11"), 0.85),
    ("ch_ahv", _is_ahv, (*same_separator("3_4_4_2", ". "), "13"), 0.95),
    ("cz_rc", _valid(rc), ("6/4",), 0.85),
    ("kr_rrn", _valid(rrn), ("6-7",), 0.9),
    ("cl_rut", _valid(rut), ("2.3.3-1", "1.3.3-1"), 0.9),
    ("ar_cuit", _is_personal_cuit, ("2-8-1",), 0.9),
    ("th_pin", _valid(pin), ("1-4-5-2-1", "1 4 5 2 1"), 0.9),
    ("my_nric", _valid(nric), ("6-2-4",), 0.8),
    ("pk_cnic", _valid(cnic), ("5-7-1",), 0.8),
    ("do_cedula", _valid(cedula), ("3-7-1",), 0.85),
)

# Numbers of digits, and words of which one must stand beside them, or one of any country.
_BY_WORDS: tuple[tuple[str, Callable[[Window], bool], tuple[int, ...], str], ...] = (
    ("us_ssn", _is_ssn, (9,), "ssn|soc sec|itin|seguro social"),
    ("ca_sin", _valid(sin), (9,), "sin$|social insurance|assurance sociale|nas$"),
    ("br_cpf", _valid(cpf), (11,), "cpf|contribuinte"),
    ("de_idnr", _valid(idnr), (11,), "steuer|idnr|id-nr|tax|tin$"),
    ("de_stnr", _valid(stnr), (10, 11, 13), "steuernummer|st.-nr|st-nr|stnr|finanzamt"),
    ("fr_nir", _is_nir, (15,), "sécu|secu|insee|nir$"),
    ("nl_bsn", _valid(bsn), (9,), "bsn|burgerservice|sofi"),
    ("pl_pesel", _valid(pesel), (11,), "pesel"),
    ("se_personnummer", _valid(personnummer), (10, 12), "personnummer|personnr|pnr$|samordning"),
    ("dk_cpr", _valid(cpr), (10,), "cpr|personnummer"),
    ("no_fodselsnummer", _valid(fodselsnummer), (11,), "fødsels|fodsels|personnummer"),
    ("ee_ik", _valid(ik), (11,), "isikukood|asmens kod"),
    ("be_nn", _valid(nn), (11,), "rijksregister|registre national|insz|niss"),
    ("at_svnr", _valid(vnr), (10,), "svnr|svn$|vsnr|sozialversicherung|versicherungsnummer"),
    ("ch_ahv", _is_ahv, (13,), "ahv|avs|sozialversicherung"),
    ("gb_nhs", _valid(nhs), (10,), "nhs"),
    ("gr_amka", _valid(amka), (11,), "amka|αμκα"),
    ("hr_oib", _valid(oib), (11,), "oib"),
    ("ro_cnp", _valid(cnp), (13,), "cnp|cod numeric"),
    ("bg_egn", _valid(egn), (10,), "egn|егн"),
    ("cz_rc", _valid(rc), (9, 10), "rodné|rodne|rč$"),
    ("pt_nif", _valid(nif), (9,), "nif|contribuinte|fiscal"),
    ("tr_tckn", _valid(tckimlik), (11,), "kimlik|tckn|t.c."),
    ("ru_inn", _valid(inn), (12,), "инн|inn$"),
    ("il_zehut", _valid(zehut), (9,), "teudat|zehut|תעודת|ת.ז"),
    ("in_aadhaar", _valid(aadhaar), (12,), "aadhaar|aadhar|adhar|uidai|uid$|आधार"),
    ("jp_my_number", _valid(my_number), (12,), "my number|マイナンバー|個人番号"),
    ("cn_ric", _valid(ric), (18,), "身份证"),
    ("kr_rrn", _valid(rrn), (13,), "주민등록|주민번호"),
    ("id_nik", _valid(nik), (16,), "nik$|ktp"),
    ("my_nric", _valid(nric), (12,), "mykad|nric|kad pengenalan"),
    ("th_pin", _valid(pin), (13,), "บัตรประชาชน|ประจำตัว"),
    ("za_id", _valid(za_idnr), (13,), "south african|sa id|id number|rsa id"),
    ("au_tfn", _valid(tfn), (8, 9), "tfn|tax file"),
    ("cl_rut", _valid(rut), (8, 9), "rut$|run$|rol único"),
)

NATIONAL_ID_RULES = (
    *(
        NumberRule(type="national_id", kind=kind, check=check, score=score, shapes=shapes)
        for kind, check, shapes, score in _BY_FORMAT
    ),
    *(
        NumberRule(
            type="national_id",
            kind=kind,
            check=check,
            score=0.92,
            lengths=lengths,
            words=Words(f"{words}|{_ANY_COUNTRY}"),
        )
        for kind, check, lengths, words in _BY_WORDS
    ),
)
