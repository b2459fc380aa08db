"""metrics.jsonl as columns, as far as it is written. Owns: the columns. Does not own: names (metrics_catalogue.py)."""

from pathlib import Path

from slipstream.conf.json_files import JsonObject
from slipstream.orchestrator.files.growing_file import GrowingFile, figures

Number = float | int | None


class MetricsTable:
    """Columns of one run: metric -> a number per row, None where it has none."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self.steps: list[int] = []
        self._columns: dict[str, list[Number]] = {}
        self.generation = 0
        """Rises when earlier rows are void, because the run was resumed from an earlier step."""

    def refresh(self) -> None:
        """Read what was written since."""
        news = self._file.news()
        if news.is_another_file:
            self.steps, self._columns = [], {}
            self.generation += 1
        for row in figures(news):
            self._append(row)

    def _append(self, row: JsonObject) -> None:
        self.steps.append(row["step"])
        for name, value in row.items():
            if value is None or name == "step":
                continue
            column = self._columns.setdefault(name, [])
            column.extend([None] * (len(self.steps) - 1 - len(column)))
            column.append(value)

    @property
    def names(self) -> list[str]:
        """Metrics that have a number in some row, in the order in which they came."""
        return list(self._columns)

    @property
    def last(self) -> dict[str, Number]:
        """The newest number of each metric."""
        return {name: column[-1] for name, column in self._columns.items() if column}

    def columns(self, names: list[str] | None = None, after_row: int = 0) -> JsonObject:
        """Rows from number `after_row` on, of these metrics; None: of all."""
        chosen = self.names if names is None else [name for name in names if name in self._columns]
        rows = range(after_row, len(self.steps))
        padded = {name: self._columns[name] for name in chosen}
        return {
            "generation": self.generation,
            "from_row": after_row,
            "steps": self.steps[after_row:],
            "columns": {
                name: [column[row] if row < len(column) else None for row in rows] for name, column in padded.items()
            },
        }
