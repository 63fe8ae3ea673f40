"""Stage report: summary.json and one offline page."""

from openforge.report.page import write_report
from openforge.report.summary import ReportError, summary

__all__ = ["ReportError", "summary", "write_report"]
