"""Built-in lists that make the prompts of a target vary: who answers, what about, in what language.

The recipe's `self_prompts` table replaces each of them.
"""

from typing import NamedTuple

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful assistant who answers briefly and to the point.",
    "You are a patient teacher who explains with examples.",
    "You are a tutor for pupils between ten and fourteen years old.",
    "You are an experienced software engineer who reviews code and finds faults.",
    "You are a programmer who writes short, tested functions.",
    "You are a data analyst who works with tables and statistics.",
    "You are a mathematician who shows every step.",
    "You are a scientist who says what is known and what is not.",
    "You are an editor who improves texts without changing their meaning.",
    "You are a writer of stories, poems and dialogues.",
    "You are a translator who cares about tone.",
    "You are a travel agent who plans trips for small budgets.",
    "You are a cook who knows dishes from all over the world.",
    "You are a gardener with forty years of practice.",
    "You are a librarian who recommends books and summarises them.",
    "You are a lawyer's assistant who explains contracts in plain words.",
    "You are an accountant who helps small shops with their books.",
    "You are a nurse who explains health matters and says when to see a doctor.",
    "You are a coach who helps people to plan their week and keep to it.",
    "You are a support agent of a company that sells household appliances.",
    "You are an engineer who repairs machines and explains how they work.",
    "You are a historian who places events in their time.",
    "You are an interviewer who prepares people for job applications.",
)
"""Rows carry one of these, or, half of the time, none."""

TOPICS = (
    "a bug in a Python program",
    "writing a function in JavaScript",
    "a database query in SQL",
    "shell commands and files",
    "the design of a small web site",
    "sorting and searching algorithms",
    "regular expressions",
    "tests for a program",
    "arithmetic with everyday numbers",
    "algebra homework",
    "geometry of triangles and circles",
    "probability and dice",
    "reading a chart or a table",
    "a logic puzzle",
    "physics of motion and energy",
    "electricity at home",
    "chemistry in the kitchen",
    "cells, plants and animals",
    "the human body",
    "planets and stars",
    "weather and climate",
    "rivers, mountains and maps",
    "ancient history",
    "the history of the twentieth century",
    "famous inventions",
    "how governments work",
    "economics and prices",
    "personal budgets and savings",
    "taxes and bookkeeping",
    "starting a small business",
    "writing an e-mail at work",
    "a job interview",
    "project planning and meetings",
    "a product description",
    "advertising and slogans",
    "summarising an article",
    "rewriting a paragraph",
    "grammar and spelling",
    "learning a foreign language",
    "translation of a sentence",
    "a short story",
    "a poem",
    "a dialogue between two characters",
    "films and series",
    "books and authors",
    "music and instruments",
    "painting and design",
    "recipes and cooking",
    "healthy eating",
    "sports and exercise",
    "sleep and stress",
    "gardening in small spaces",
    "pets and their care",
    "repairs in the house",
    "cars, bicycles and trains",
    "planning a journey",
    "games and riddles",
    "raising children",
    "friendship and family",
    "philosophy and ethics",
)


class Language(NamedTuple):
    """A language a user may write in."""

    name: str
    scripts: tuple[str, ...]
    """Words that Unicode's names of its letters begin with."""

    openers: tuple[str, ...]
    """How texts may begin, for targets that cannot be told what to write about."""


LANGUAGES = (
    Language(
        "English",
        ("LATIN",),
        (
            "How do I",
            "What is the best way to",
            "Explain",
            "Write a short text about {topic}:",
            "I have a question about {topic}.",
            "Here is what everybody should know about {topic}:",
            "The first thing to understand about {topic} is",
            "Once upon a time",
            "Yesterday I tried to",
            "Please help me with {topic}.",
        ),
    ),
    Language(
        "Spanish",
        ("LATIN",),
        ("¿Cómo puedo", "Explica", "¿Cuál es", "Escribe un texto sobre", "Necesito ayuda con"),
    ),
    Language(
        "French",
        ("LATIN",),
        ("Comment puis-je", "Explique", "Quelle est", "Écris un texte sur", "J'ai besoin de"),
    ),
    Language(
        "German",
        ("LATIN",),
        ("Wie kann ich", "Erkläre", "Was ist", "Schreibe einen Text über", "Ich brauche Hilfe bei"),
    ),
    Language(
        "Portuguese",
        ("LATIN",),
        ("Como posso", "Explique", "Qual é", "Escreva um texto sobre", "Preciso de ajuda com"),
    ),
    Language(
        "Italian",
        ("LATIN",),
        ("Come posso", "Spiega", "Qual è", "Scrivi un testo su", "Ho bisogno di aiuto con"),
    ),
    Language(
        "Russian",
        ("CYRILLIC",),
        ("Как мне", "Объясни", "Что такое", "Напиши текст о", "Мне нужна помощь с"),
    ),
    Language(
        "Chinese",
        ("CJK",),
        ("请问如何", "请解释", "什么是", "请写一篇关于", "我需要帮助"),
    ),
    Language(
        "Japanese",
        ("CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"),
        ("どうすれば", "説明してください。", "昨日、私は", "次の文章を", "おすすめの"),
    ),
    Language(
        "Korean",
        ("HANGUL",),
        ("어떻게 하면", "설명해 주세요.", "다음 글을", "저는 어제", "추천해 주세요."),
    ),
    Language(
        "Arabic",
        ("ARABIC",),
        ("كيف يمكنني", "اشرح لي", "ما هو", "اكتب نصا عن", "أحتاج إلى مساعدة في"),
    ),
    Language(
        "Hindi",
        ("DEVANAGARI",),
        ("मैं कैसे", "समझाइए कि", "क्या है", "के बारे में लिखिए:", "मुझे मदद चाहिए"),
    ),
)
"""English is asked for half of the time."""
