"""The demo model, and the small tasks with checkable answers that it solves."""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
# The name of the demo model wherever a model is named.
NAME = "demo"

# What a chat shows beside its first question.
ABILITIES = (
    "The demo model only knows small tasks: count, repeat, spell or reverse a word, add, subtract, list days, months "
    'or letters, pick from a list. Try "Count from 95 to 105."'
)
EXAMPLE_PROMPTS = (
    "Count from 95 to 105.",
    'Repeat the word "river" 4 times.',
    'Spell the word "hippo".',
    'Reverse the word "stone".',
    "List the days from Friday to Monday.",
    "What is 348 + 275?",
    "List the letters from k to q.",
    "Here is a list: 1 fox, 2 moon, 3 elm, 4 salt. Which word is number 3?",
)


def directory_of(model: str | None) -> str:
    """Returns the model as given, or the demo model's directory for its name or for None.

    An existing directory called `demo` takes precedence.
    """
    is_demo = model is None or (model == NAME and not Path(model).exists())
    return str(MODEL_DIR) if is_demo else str(model)
