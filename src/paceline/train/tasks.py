"""Tasks that need no data set: prompts made from word lists, and from passages the target wrote.

The lists are small on purpose: variety comes from the target, which writes every passage, question and
answer itself at temperatures up to 1.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

_PLACES = (
    "Lisbon", "Nairobi", "Osaka", "Montreal", "Lima", "Oslo", "Cairo", "Mumbai", "Denver", "Hanoi", "Warsaw",
    "Perth", "Bogota", "Dublin", "Athens", "Seoul", "Manila", "Tunis", "Prague", "Boston", "Leeds", "Accra",
)  # fmt: skip
_NAMES = (
    "Maria", "James", "Aisha", "Tom", "Elena", "Raj", "Sofia", "David", "Mei", "Omar", "Grace", "Lucas", "Nina",
    "Samuel", "Hannah", "Victor", "Clara", "Ben", "Priya", "Oscar", "Julia", "Marcus", "Leah", "Peter", "Ivy",
)  # fmt: skip
_THINGS = (
    "apples", "books", "marbles", "pencils", "stamps", "tickets", "cookies", "flowers", "shirts", "bottles",
    "eggs", "toy cars", "oranges", "chairs", "stickers", "candles", "coins", "cupcakes", "hats", "notebooks",
)  # fmt: skip
_TOPICS = (
    "a city election", "a football match", "a storm on the coast", "a new bridge", "a museum robbery",
    "a space mission", "a hospital opening", "a trade dispute", "a rescue at sea", "a film festival", "a school strike",
    "a forest fire", "a chess championship", "a car recall", "a court verdict", "a train accident", "a music prize",
    "a housing plan", "a wildlife study", "a bank merger", "a family reunion", "a flood", "a marathon",
    "a medical discovery", "a police investigation", "a royal visit", "a tennis final", "a computer outage",
    "a restaurant closing", "a lost dog that came home", "an airline cancelling flights", "a volcano", "a peace talk",
    "a factory opening", "a teacher who won an award", "a celebrity wedding", "a boxing match", "a plane landing safely",
)  # fmt: skip
_SUBJECTS = (
    "the history of the printing press", "how vaccines work", "the water cycle", "the Roman Empire", "black holes",
    "photosynthesis", "the French Revolution", "coral reefs", "how computers store data", "the human heart",
    "the Silk Road", "earthquakes", "jazz music", "the solar system", "bees", "the Renaissance", "inflation",
    "electric cars", "the Amazon rainforest", "sleep", "the Cold War", "dinosaurs", "volcanoes", "the Olympic Games",
    "chocolate", "the immune system", "rivers", "democracy", "the moon landing", "antibiotics", "glaciers", "Shakespeare",
)  # fmt: skip
_LANGUAGES = ("German", "French", "Spanish", "Italian", "Portuguese", "Dutch", "Chinese", "Russian")
_KINDS_OF_QUESTION = ("who", "when", "where", "what", "which", "how many", "what year", "what is the name of")


def passage_prompt(rng: random.Random) -> str:
    """A request for a text of one to several paragraphs."""
    length = rng.choice(("a short", "a long", "a detailed", "a"))
    shape = rng.randrange(4)
    if shape == 0:
        topic, place, name = rng.choice(_TOPICS), rng.choice(_PLACES), rng.choice(_NAMES)
        return f"Write {length} news article about {topic} in {place}. Mention a person called {name}."
    if shape == 1:
        return f"Write {length} encyclopedia article about {rng.choice(_SUBJECTS)}."
    if shape == 2:
        name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
        return f"Write {length} story about {name} from {rng.choice(_PLACES)} and some {thing}."
    return f"Explain {rng.choice(_SUBJECTS)} in {rng.choice(('simple words', 'four paragraphs', 'detail'))}."


def sentence_prompt(rng: random.Random) -> str:
    """A request for one sentence in some language, to be translated later."""
    language = rng.choice(_LANGUAGES[:6])
    about = rng.choice(
        (rng.choice(_TOPICS), rng.choice(_SUBJECTS), f"{rng.choice(_NAMES)} in {rng.choice(_PLACES)}")
    )
    return f"Write one {rng.choice(('long', 'short', 'news'))} sentence in {language} about {about}."


def question_prompt(rng: random.Random) -> str:
    """A request for a factual question, to be asked later."""
    start, about = rng.choice(_KINDS_OF_QUESTION), rng.choice((*_SUBJECTS, *_TOPICS, *_PLACES))
    return (
        f"Write one short trivia question that starts with '{start}', about {about}. Write only the question."
    )


def summary(rng: random.Random, passage: str) -> str:
    """Over a passage."""
    form = rng.choice(("Summarize: {}", "Summarize: {}", "Summarize the following text:\n\n{}", "{}\n\nTL;DR", "Give a one-paragraph summary of this article: {}", "Summarize in three sentences: {}"))  # fmt: skip
    return form.format(passage)


def translation(rng: random.Random, sentence: str) -> str:
    """Over a sentence whose language does not matter much to a small target."""
    source, goal = rng.sample(_LANGUAGES, 2)
    form = rng.choice(("Translate {s} to English: {t}", "Translate {s} to English: {t}", "Translate to {g}: {t}", "Translate English to {g}: {t}", "What does this mean in English? {t}"))  # fmt: skip
    return form.format(s=source, g=goal, t=sentence)


def reading(rng: random.Random, passage: str) -> str:
    """A question or an extraction over a passage."""
    form = rng.choice((
        "{}\n\nWho is mentioned in this text?", "{}\n\nWhat is the main point of this text?",
        "Read the text and list its key facts.\n\n{}", "{}\n\nExtract all names and places as a list.",
        "Answer from the text only: what happened, and why?\n\n{}", "{}\n\nWrite three questions about this text and answer them.",
        "Rewrite this text for a child: {}", "{}\n\nWhat would be a good title for this text?",
    ))  # fmt: skip
    return form.format(passage)


def word_problem(rng: random.Random) -> str:
    """Arithmetic told as a story, in two to four steps."""
    name, other = rng.sample(_NAMES, 2)
    thing, second = rng.sample(_THINGS, 2)
    a, b, c = rng.randint(2, 60), rng.randint(2, 20), rng.randint(2, 9)
    percent = rng.choice((10, 20, 25, 50, 75))
    forms = (
        f"{name} has {a} {thing}. {other} gives {name} {b} more, and then {name} loses {c}. How many {thing} does {name} have now?",
        f"A box holds {b} {thing}. {name} buys {c} boxes and gives {a % b} {thing} to {other}. How many {thing} are left?",
        f"{name} earns ${a} a day and works {c} days a week. How much does {name} earn in {b} weeks?",
        f"{thing.capitalize()} cost ${c} each and {second} cost ${b} each. {name} buys {a} {thing} and {c} {second}. How much does {name} pay in total?",
        f"{name} is {b + c} years old. {other} is {c} years younger than twice {name}'s age. How old will {other} be in {b} years?",
        f"A train travels {a} miles in the first hour and {percent}% more in the second hour. How many miles does it travel in total?",
        f"{name} reads {b} pages on Monday, twice as many on Tuesday, and {c} fewer than Tuesday on Wednesday. How many pages does {name} read in the three days?",
        f"{name} has ${a * 4}. {name} spends {percent}% of it on {thing} and ${c} on {second}. How much money is left?",
        f"There are {a * c} {thing} in a store. {other} buys {percent}% of them. {name} buys half of the rest. How many {thing} are left?",
        f"{name} bakes {c} trays of {b} {thing}. {other} eats {c}. The rest is shared between {c} friends. How many does each friend get?",
    )  # fmt: skip
    return rng.choice(forms)


def code(rng: random.Random) -> str:
    """A small programming task."""
    task = rng.choice((
        "reverses a string", "checks whether a number is prime", "sorts a list of names", "counts words in a text",
        "computes the n-th Fibonacci number", "finds the largest of three numbers", "merges two dictionaries",
        "removes duplicates from a list", "converts Celsius to Fahrenheit", "reads a CSV file", "finds a palindrome",
        "computes the average of a list", "implements a stack", "searches a sorted list", "flattens a nested list",
    ))  # fmt: skip
    return f"Write a {rng.choice(('Python', 'Python', 'JavaScript', 'C'))} function that {task}."


def advice(rng: random.Random) -> str:
    """An everyday request."""
    name, subject, thing = rng.choice(_NAMES), rng.choice(_SUBJECTS), rng.choice(_THINGS)
    return rng.choice((
        f"Give me five tips about {subject}.", f"Write a short email to {name} about the {thing}.",
        f"What should I know about {rng.choice(_PLACES)} before I travel there?", f"Write a poem about {subject}.",
        f"Compare {subject} and {rng.choice(_SUBJECTS)}.", f"Give me a recipe with {thing}.",
        f"Why is {subject} important?", f"Make a list of ten {thing}.", f"What is {subject}?",
        f"How do I explain {subject} to my friend {name}?", f"Write a dialogue between {name} and a shopkeeper about {thing}.",
    ))  # fmt: skip


PLAIN: dict[str, Callable[[random.Random], str]] = {
    "math": word_problem,
    "code": code,
    "advice": advice,
    "writing": passage_prompt,
}
OVER_PASSAGE: dict[str, Callable[[random.Random, str], str]] = {"summary": summary, "reading": reading}


def cut_passage(rng: random.Random, passages: Sequence[str]) -> str:
    """One or several passages, or a piece of one: prompts of many lengths."""
    text = rng.choice(passages)
    if rng.random() < 0.35:
        text = f"{text} {rng.choice(passages)}"
    words = text.split(" ")
    keep = rng.randint(min(40, len(words)), len(words))
    return " ".join(words[:keep]) if rng.random() < 0.5 else text
