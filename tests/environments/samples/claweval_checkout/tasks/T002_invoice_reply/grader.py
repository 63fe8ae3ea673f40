"""Stand-in grader: the English variant of its peer."""

from claw_eval.graders.base import load_peer_grader

_Base = load_peer_grader("T001zh_invoice_reply")


class InvoiceGraderEN(_Base):
    WORD = "invoice"
