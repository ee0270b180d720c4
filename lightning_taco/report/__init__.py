"""A page that shows a run: its loss, what compression did to it, and what was done about it."""

from lightning_taco.report.command import report, report_of, write_page
from lightning_taco.report.reading import ReportError

__all__ = ["ReportError", "report", "report_of", "write_page"]
