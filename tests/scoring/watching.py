"""A watcher of a scoring run that remembers what it was told."""

from reflogp.scoring.runs.callbacks import ProgressCallbacks


class Watching(ProgressCallbacks):
    """Calls `at_commit` at the commit of that number, and at the next ones as long as it returns False."""

    def __init__(self, number=0, at_commit=None):
        self.bad, self.done, self.found, self.total, self.commits = {}, 0, 0, 0, 0
        self._number, self._at_commit = number, at_commit if number else None

    def begin(self, sequences):
        self.total = sequences

    def read(self, rows):
        self.rows = rows

    def hits(self, sequences):
        self.found += sequences

    def advance(self, sequences, tokens):
        self.done += sequences

    def bad_row(self, row, problem):
        self.bad[row] = problem

    def committed(self, snapshot):
        self.snapshot = snapshot
        self.commits += 1
        if self._at_commit is not None and self.commits >= self._number and self._at_commit() is not False:
            self._at_commit = None
