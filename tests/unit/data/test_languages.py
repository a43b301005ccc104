"""Languages and scripts, guessed well enough to count by."""

import pytest

from fledge.data.languages import guess_language


@pytest.mark.parametrize(
    ("text", "language", "script"),
    [
        ("What is the capital of France?", "en", "Latn"),
        ("Write a function to find the shortest path.", "en", "Latn"),
        ("Wie heißt die Hauptstadt von Frankreich?", "de", "Latn"),
        ("Quelle est la capitale de la France et pourquoi ?", "fr", "Latn"),
        ("¿Cuál es la capital de Francia?", "es", "Latn"),
        ("Qual é a capital da França?", "pt", "Latn"),
        ("Qual è la capitale della Francia?", "it", "Latn"),
        ("Hoe heet de hoofdstad van Frankrijk?", "nl", "Latn"),
        ("Thủ đô của Pháp là gì?", "vi", "Latn"),
        ("Как это работает и что мы можем сделать?", "ru", "Cyrl"),
        ("Як це працює і що ми можемо зробити для нього?", "uk", "Cyrl"),
        ("ما هي عاصمة فرنسا؟", "ar", "Arab"),
        ("این کتاب را برای او می‌خرم که از آن است", "fa", "Arab"),
        ("東京の天気はどうですか", "ja", "Jpan"),
        ("我需要为 John Doe 生成一张 invoice", "zh", "Hani"),
        ("서울의 날씨는 어때요?", "ko", "Hang"),
        ("फ्रांस की राजधानी क्या है?", "hi", "Deva"),
        ("Ποια είναι η πρωτεύουσα;", "el", "Grek"),
        ("12 + 30 = ?", "und", "Zyyy"),
        ("", "und", "Zyyy"),
        ("xs.sort(key=len)", "und", "Latn"),
    ],
)
def test_guesses(text: str, language: str, script: str) -> None:
    assert guess_language(text) == (language, script)


def test_only_the_start_of_a_long_text_is_looked_at() -> None:
    assert guess_language("What is this? " * 1000 + "東京" * 10**6).language == "en"
