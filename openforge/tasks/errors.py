"""The error of this stage."""


class TasksError(ValueError):
    """Raw tasks that cannot be had; the message names the folder, file, column, row or task."""
