"""Numbers with their nouns, for what people read."""


def counted(number: int, noun: str) -> str:
    """Examples: "1 trainer rank", "2 trainer ranks", "3 processes"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('s') else 's'}"
