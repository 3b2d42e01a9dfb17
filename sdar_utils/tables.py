"""Tables as Markdown."""

from collections.abc import Sequence


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], align: bool = False) -> str:
    """A Markdown table. `align` is for reading it as plain text: cells are padded, numbers end at the right."""
    lines = [[cell.replace("|", r"\|") for cell in line] for line in (columns, *rows)]
    rules = ["---"] * len(columns)
    if align:
        for i, (title, *cells) in enumerate(zip(*lines, strict=True)):
            width = max(map(len, (title, *cells, rules[i])))
            is_number = bool(cells) and cells[0].startswith(tuple("-∞0123456789"))
            rules[i] = "-" * (width - 1) + (":" if is_number else "-")
            for line in lines:
                line[i] = line[i].rjust(width) if is_number else line[i].ljust(width)
    head, *body = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rules, *body))
