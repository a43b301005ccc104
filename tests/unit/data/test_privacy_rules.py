"""Phone numbers and national ids: every format once, and what looks like it but is not."""

import pytest

from fledge.data.privacy import find
from fledge.data.privacy.letter_ids import CODES
from fledge.data.privacy.national_ids import NATIONAL_ID_RULES

# Invented numbers with right check digits.
IDS = {
    "us_ssn": ("536-22-8613", "SSN 536228613", "itin: 934 78 1205"),
    "ca_sin": ("SIN 304-651-946",),
    "br_cpf": ("416.229.256-61", "CPF 41622925661"),
    "de_idnr": ("Steuer-ID 87 136 392 347", "IdNr 45631019274"),
    "de_stnr": ("Steuernummer 151/815/08156",),
    "fr_nir": ("2 92 12 26 425 625 34", "292122642562534", "2 53 07 2B 073 004 70"),
    "nl_bsn": ("BSN 407694274", "burgerservicenummer 407.694.274"),
    "pl_pesel": ("PESEL: 53090989216",),
    "se_personnummer": ("personnummer 851218-0574",),
    "dk_cpr": ("CPR 040389-7713",),
    "no_fodselsnummer": ("18108133860", "fødselsnummer 181081 33860"),
    "ee_ik": ("isikukood 36805280109",),
    "be_nn": ("84.08.10-335.21", "84081033521"),
    "at_svnr": ("SVNR 9503 270855",),
    "ch_ahv": ("756.3333.9044.81", "AHV 7563333904481"),
    "gb_nhs": ("NHS 406 994 6756",),
    "gr_amka": ("ΑΜΚΑ 12055314137",),
    "hr_oib": ("OIB 84204373051",),
    "ro_cnp": ("CNP 2990523408179",),
    "bg_egn": ("ЕГН 7523169263",),
    "cz_rc": ("730613/2394", "rodné číslo 7306132394"),
    "pt_nif": ("NIF 276235207",),
    "tr_tckn": ("TC kimlik 46255655244",),
    "ru_inn": ("ИНН 370450891600",),
    "il_zehut": ("teudat zehut 107027468",),
    "in_aadhaar": ("Aadhaar 5018 9957 7342", "आधार 501899577342"),
    "jp_my_number": ("マイナンバー601293020160",),
    "cn_ric": ("110105195104038982", "身份证11010519491231002X"),
    "kr_rrn": ("880511-1892052",),
    "id_nik": ("NIK 3171062311673610",),
    "my_nric": ("931024-14-1876", "NRIC 931024141876"),
    "th_pin": ("2-7060-81989-01-1", "บัตรประชาชน 2706081989011"),
    "za_id": ("SA ID 9607274354086",),
    "au_tfn": ("TFN 552 869 569",),
    "cl_rut": ("20.090.934-8", "rut 20090934-8"),
    "ar_cuit": ("20-30655943-6",),
    "pk_cnic": ("34201-0891231-8",),
    "do_cedula": ("001-1391820-5",),
    "es_dni": ("32988864X", "32.988.864-X"),
    "es_nie": ("Z6238642N",),
    "it_codice_fiscale": ("RSSMRA59R02H501J",),
    "gb_nino": ("JK 23 45 67 B", "JK234567B"),
    "fi_hetu": ("190180-2603",),
    "mx_curp": ("PERJ830606HDFPSB62",),
    "pt_cc": ("14498876 3 ZZ9",),
    "sg_nric": ("S5339284I",),
    "in_pan": ("PAN ABKPS6498E",),
    "ie_pps": ("PPS 7411030L",),
    "de_rvnr": ("Rentenversicherungsnummer 65 170839 J 008",),
    "passport": ("passport C01X00T47", "护照E12345678"),
}
WITHOUT_CHECK_DIGIT = {
    *("us_ssn", "gb_nino", "de_rvnr", "de_stnr", "dk_cpr", "passport", "in_pan", "pk_cnic"),
    *("id_nik", "my_nric"),
}


def kinds(text: str) -> list[str]:
    return [finding.type for finding in find(text)]


@pytest.mark.parametrize("kind", IDS)
def test_every_national_id_is_found(kind: str) -> None:
    for text in IDS[kind]:
        assert kinds(text) == ["national_id"], text
        assert kinds(f"我的是{text}。") == ["national_id"], text


def test_every_rule_has_an_example() -> None:
    assert {rule.kind for rule in NATIONAL_ID_RULES} | {code.kind for code in CODES} == set(IDS)


@pytest.mark.parametrize("kind", sorted(IDS.keys() - WITHOUT_CHECK_DIGIT))
def test_one_wrong_digit_is_no_national_id(kind: str) -> None:
    for text in IDS[kind]:
        at = max(i for i, character in enumerate(text) if character.isdigit())
        for step in (1, 2, 3):
            digit = str((int(text[at]) + step) % 10)
            assert "national_id" not in kinds(text[:at] + digit + text[at + 1 :]), (text, digit)


@pytest.mark.parametrize(
    "text",
    [
        "078-05-1120",  # printed in wallets, never anybody's
        "000-12-3456",
        "666-12-3456",
        "900-12-3456",
        "123-00-4567",
        "Case number 536-22-8613",
        "407694274",
        "53090989216",
        "851218-0574",
        "5018 9957 7342",
        "GB 23 45 67 B",
        "ABKPS6498E",
        "7411030L",
        "E12345678",
        "node-32988864X",
        "S5339284Z",
        "1.38435736E+12",
    ],
)
def test_without_its_words_or_rules_it_is_no_national_id(text: str) -> None:
    assert "national_id" not in kinds(text)


@pytest.mark.parametrize(
    "number",
    [
        *("+1 415 555 0132", "+14155550132", "(415) 555-0132", "415-555-0132", "415.555.0132"),
        *("1-800-555-0199", "+44 (0)20 7946 0018", "+44 20 7946 0018", "07700 900461"),
        *("020 7946 0018", "+49 30 901820", "0221/4711470", "(040) 66969123", "0049 30 901820"),
        *("06 12 34 56 78", "01.42.68.53.00", "+33 1 42 68 53 00", "612 34 56 78"),
        *("+34 912 345 678", "+39 06 6982 1234", "(11) 98765-4321", "+55 21 2345-6789"),
        *("138-1234-5678", "010-82345678", "+86 139 1234 5678", "090-1234-5678", "03-1234-5678"),
        *("0120-444-444", "010-1234-5678", "02-555-0123", "+91 98765 43210", "8 (495) 123-45-67"),
        *("+7 916 123-45-67", "044 668 18 00", "070-123 45 67", "06-12345678", "0470 12 34 56"),
        *("0532 123 45 67", "0412 345 678", "+972 3 555 0123", "+971 4 555 0123"),
    ],
)
def test_phone_numbers_are_known_by_their_shape(number: str) -> None:
    text = f"x {number} y"
    assert [(f.type, text[f.start : f.end]) for f in find(text)] == [("phone", number)]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("phone 5550143", "5550143"),
        ("call me at 4155550132", "4155550132"),
        ("tel: 030 901820 10115 Berlin", "030 901820"),
        ("my number is 415 555 0132", "415 555 0132"),
        ("555-0143 (mobile)", "555-0143"),
        ("手机13812345678", "13812345678"),
        ("phone: 4 1 5 5 5 5 0 1 3 2", "4 1 5 5 5 5 0 1 3 2"),
        ("phone ４１５５５５０１３２", "４１５５５５０１３２"),
        ("phone (351) 921931417", "(351) 921931417"),
        ("415-555-0132x77", "415-555-0132"),
    ],
)
def test_words_make_other_numbers_phone_numbers(text: str, number: str) -> None:
    assert [(f.type, text[f.start : f.end]) for f in find(text)] == [("phone", number)]


@pytest.mark.parametrize(
    "text",
    [
        *("5550143", "4155550132", "030 901820", "415 555 0132", "13812345678", "1700000000000"),
        *("phone 2024-01-15", "call 15.01.2024", "call 1990-2000", "phone 192.168.100.200"),
        *("phone 3.14159265", "call f(1234567, 2)", "phone ISBN 978-3-16-148410-0"),
        *("the number of people is 12345-67890", "mobility index 12345678"),
        *("the number of birds is 1200-1000 = 200", "number 23786 - 17509 = 6277"),
        *("Order 415-555-0132", "注文番号090-1234-5678", "Part number 555-123-4567"),
        *(
            "01 02 03 04 05",
            "x+4917112345678",
            "3 +4917112345678",
            "+999 123 456 789",
            "0.0260109244",
            "+35236450.6",
        ),
        *("$415-555-0132", "2023-11-14 22:13:20", "90210-1234", "12 345 678"),
        *("550e8400-e29b-41d4-a716-446655440000", "40.712776, -74.005974"),
    ],
)
def test_other_numbers_are_no_phone_numbers(text: str) -> None:
    assert kinds(text) == []
